"""The checkpoint before the last one, which is kept until the last one has shown to be sound."""

import os
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lit_diffusion.files import sync_folder


class CheckpointBefore:
    """A second name of a file, under which its old content outlives the writing of a new one.

    An update may ruin weights although its loss and gradients were finite. A checkpoint of such
    weights looks like others; the next loss tells. No space is taken but that of the old file.

    Args:
        path: of the file, in whose folder before-<name> is the second name.

    Example:
        >>> import tempfile
        >>> from lit_diffusion.files import replace_text
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     last = Path(folder) / "last.ckpt"
        ...     replace_text(last, "sound")
        ...     before = CheckpointBefore(last)
        ...     before.keep()
        ...     replace_text(last, "ruined")
        ...     print(before.bring_back(), last.read_text(), before.is_there)
        True sound False
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = path.with_name(f"before-{path.name}")

    @property
    def is_there(self) -> bool:
        """Whether an old content is kept."""
        return self._before.exists()

    def keep(self) -> None:
        """Give the present content the second name, unless an older one has yet to be let go."""
        if self.is_there or not self._path.exists():
            return
        try:
            os.link(self._path, self._before)
        except OSError as error:  # a file system without hard links
            rank_zero_warn(
                f"{self._path} is replaced at each save without its old content being kept until "
                f"the next loss is finite: {error}."
            )

    def let_go(self) -> None:
        """Drop the old content."""
        self._before.unlink(missing_ok=True)

    def bring_back(self) -> bool:
        """Put the old content in place of the new one; whether there was one."""
        if not self.is_there:
            return False
        os.replace(self._before, self._path)
        sync_folder(self._path.parent)
        return True
