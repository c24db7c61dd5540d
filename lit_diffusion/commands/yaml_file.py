"""Reading YAML that somebody else may have written."""

from pathlib import Path
from typing import Any

import yaml

from lit_diffusion.extent import check_extent
from lit_diffusion.yaml_extent import MOST_VALUES, check_text

MOST_BYTES = 10**7


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
        text = path.read_text()
        check_text(text)
        content = yaml.safe_load(text)
        check_extent([content], MOST_VALUES)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    return content
