"""Read YAML files from untrusted sources."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.config.renamed import rename_config
from lit_diffusion.files import check_regular, checked_read

MAX_BYTES = 10**5
"""Maximum size of a config in bytes. PyYAML parses a file of this size quickly."""

MAX_ALIASES = 10
"""Maximum number of aliases in a config. A few nested aliases could expand beyond any memory."""

MAX_DEPTH = 100
"""Maximum depth of nesting. The time that PyYAML needs grows with the square of the depth."""


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file, with old names replaced (`config.renamed`).

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not YAML, is not a regular file, is too large, is nested too
            deeply, or has too many aliases.
    """
    if check_regular(path).stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes; a config must be smaller.")
    try:
        with checked_read(path, "YAML") as file:
            text = file.read_text()
            depth = num_aliases = 0
            for event in yaml.parse(text, yaml.SafeLoader):
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                num_aliases += isinstance(event, yaml.AliasEvent)
                if depth > MAX_DEPTH:
                    raise ValueError(f"it is nested too deep, more than {MAX_DEPTH} levels")
                if num_aliases > MAX_ALIASES:
                    raise ValueError(
                        f"it has more than {MAX_ALIASES} aliases (*name), which no config needs"
                    )
            content = yaml.safe_load(text)
            json.dumps(content, default=str, skipkeys=True)  # raises if a value contains itself
            return rename_config(content)
    except ValueError as error:
        fault = error.__cause__
        if not isinstance(fault, yaml.MarkedYAMLError) or fault.problem_mark is None:
            raise
        line = fault.problem_mark.line + 1
        raise ValueError(f"{path}, line {line}: {fault.problem}; correct the YAML.") from error


def refuse_files(value: Any, source: Path) -> None:
    """Raise ValueError if a setting is the path of a config or of a pipe.

    jsonargparse would open a config or pipe that a setting names. `source` is the file that
    contains the settings. A relative path in a setting may be relative to the current folder or to
    the folder of `source`.
    """
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            refuse_files(part, source)
        if not isinstance(part, str):
            continue
        for file in (Path(part), source.parent / part):
            is_read = part.endswith((".yaml", ".yml", ".json")) or not os.path.isfile(file)
            if is_read and os.path.exists(file) and not file.is_dir():
                raise ValueError(
                    f"{source} names the file {file}, but a config or checkpoint cannot include "
                    "another config: copy the settings, or pass the file with another --config."
                )
