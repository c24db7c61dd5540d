"""What the arms of a sweep are made of: a config, and further ones that change it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from lit_diffusion.config.yaml_file import read_yaml

BASELINE = "baseline"
"""Name of the arm that is the experiment's config alone."""


def arm_files(config: str, texts: Sequence[str]) -> dict[str, list[str]]:
    """Name -> files of each arm, the first of which is `config`; that alone is the baseline.

    Args:
        config: file of the experiment.
        texts: files, or several joined by +.

    Raises:
        ValueError: where two arms have one name, or an arm has a file twice.

    Example:
        >>> arm_files("run.yaml", ["arms/md.yaml", "arms/md.yaml+clts.yaml"])["md+clts"]
        ['run.yaml', 'arms/md.yaml', 'clts.yaml']
    """
    arms = {BASELINE: [config]}
    for text in texts:
        files = [text] if Path(text).is_file() else text.split("+")
        name = "+".join(Path(file).stem for file in files)
        if name in arms:
            raise ValueError(f"two arms are named {name}; rename {text}, since folders go by name.")
        arms[name] = [config, *files]
        counts = Counter(Path(file).resolve() for file in arms[name])
        if twice := [path.name for path, count in counts.items() if count > 1]:
            raise ValueError(
                f"arm {name} has {twice[0]} twice, which would add its callbacks twice; name it "
                "once."
            )
    return arms


def overrides(files: Sequence[str]) -> Iterator[str]:
    """A sentence for each setting of one file that a later one takes back."""
    for first, second in combinations(files, 2):
        changed = read_yaml(second) or {}
        for setting in _replaced(read_yaml(first) or {}, changed):
            yield f"{Path(second).name} replaces what {Path(first).name} sets: {setting}"


def _replaced(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in old.items():
        name = key.removesuffix("+")  # of a list that is added to, not replaced
        if name not in new or new[name] == value:
            continue
        both = isinstance(value, Mapping) and isinstance(new[name], Mapping)
        kind = value.get("class_path") if both else None
        if both and new[name].get("class_path", kind) == kind:
            yield from _replaced(value, new[name], f"{prefix}{name}.")
        elif both or not isinstance(new[name], Mapping):
            yield prefix + name
