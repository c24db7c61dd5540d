"""The parser of command lines that are not LightningCLI's."""

import argparse
import re
from typing import NoReturn

from lit_diffusion.config.messages import innermost


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves telling a mistake to `cli.main`: one line, no usage."""

    def __init__(self, command: str, description: str = "", add_help: bool = True) -> None:
        super().__init__(
            f"lit-diffusion {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )
        # What begins like a negative number is a value and no option: -1,2 is a list of labels.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of printing."""
        options = re.findall(r"--([\w.-]+)", self.format_usage())
        raise ValueError(innermost(ValueError(message), options))
