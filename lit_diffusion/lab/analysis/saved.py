"""Results on disk: arrays in an .npz, all else in a .json beside it."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from lit_diffusion.files import atomic_write, atomic_write_text


class Saved:
    """Base of frozen dataclasses whose fields are arrays, or what JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def save(self, path: str | Path) -> None:
        """Write `path`.npz and `path`.json; other processes may write the same meanwhile."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {k: v for k, v in known.items() if isinstance(v, np.ndarray)}
        told = {k: v for k, v in known.items() if k not in arrays}
        with atomic_write(Path(f"{path}.npz"), shared=True) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        atomic_write_text(Path(f"{path}.json"), json.dumps(told, indent=1) + "\n", shared=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """What `save` has written.

        Raises:
            FileNotFoundError: where a file is missing.
        """
        told = json.loads(Path(f"{path}.json").read_text())
        with np.load(f"{path}.npz") as arrays:
            return cls(**told, **{name: arrays[name] for name in arrays.files})
