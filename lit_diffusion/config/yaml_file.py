"""Reading YAML that somebody else may have written."""

import json
from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.config.renamed import rename_config
from lit_diffusion.files import require_regular_file

MOST_BYTES = 10**5
"""Of a config, for all that can be written in so many is read in no time."""

MOST_ALIASES = 10
"""Ten lines of aliases to aliases can stand for more than a machine has."""


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file, with present names for old ones (`renamed`).

    Raises:
        ValueError: for a file that is not YAML, too large or nested too deep.
    """
    path = Path(path)
    if path.exists():
        require_regular_file(path)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes: that is no config.")
    try:
        text = path.read_text()
        events = yaml.parse(text, yaml.SafeLoader)
        if sum(isinstance(event, yaml.AliasEvent) for event in events) > MOST_ALIASES:
            raise ValueError(
                f"a config with more than {MOST_ALIASES} aliases (*name) is not taken for it"
            )
        content = yaml.safe_load(text)
        json.dumps(content, default=str, skipkeys=True)  # raises where something holds itself
        return rename_config(content)
    except RecursionError:
        raise ValueError(f"{path} is not YAML: it is nested too deep.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
