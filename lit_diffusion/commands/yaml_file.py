"""Reading YAML that somebody else may have written."""

from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.extent import check_extent

MOST_BYTES = 10**7
MOST_VALUES = 10**5
"""Of a config. Ten lines of aliases to aliases can stand for more than a machine has."""


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file.

    Raises:
        OSError: where it cannot be read.
        ValueError: where it is no regular file, no YAML, or too large or deep; names it.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file.")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes: that is no config.")
    try:
        content = yaml.safe_load(path.read_text())
        check_extent([content], MOST_VALUES)
    except RecursionError:
        raise ValueError(f"{path} is not YAML that can be read: it is nested too deep.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    return content
