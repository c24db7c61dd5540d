"""How much a pickle stands for, told from its instructions and without following them.

`torch.load(weights_only=True)` runs no code, but it hashes the keys of dicts while it reads. A
tuple that holds one tuple twice, and so on for sixty levels, takes 300 bytes and hashes for ever.
"""

import pickletools
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}
"""Put objects into the one below them on the stack."""

_IN_OLD_FILES = 5
"""Pickles that `torch.save` wrote one after another before it wrote archives."""

_CHARACTERS = 100
"""Of a text, that count as much as a value."""


def check_pickles(path: Path, most: int) -> None:
    """Refuse a file of `torch.save` in which few instructions stand for many values.

    Args:
        path: of any file; what is no such file is left for `torch.load` to refuse.
        most: values that may be referred to again, each time with all that they hold.

    Raises:
        ValueError: where they are more.
        pickle.UnpicklingError: where the instructions make no sense.
    """
    with path.open("rb") as file:
        archived = file.read(4) == b"PK\x03\x04"  # by which torch.load tells them apart
    if archived:
        reader: Any = torch._C.PyTorchFileReader(str(path))  # of which the stubs say little
        if reader.has_record("data.pkl"):
            check_pickle(BytesIO(reader.get_record("data.pkl")), most)
        return
    with path.open("rb") as file:
        for _ in range(_IN_OLD_FILES):
            if not file.peek(1):
                return
            check_pickle(file, most)


def check_pickle(file: IO[bytes], most: int) -> None:
    """Refuse the pickle that a file goes on with if few instructions stand for many values.

    Whatever the pickle does not refer to again takes bytes of its own, so only that is counted.

    Raises:
        ValueError: where it is more than `most`.
        pickle.UnpicklingError: where the instructions make no sense.

    Example:
        >>> import pickle
        >>> check_pickle(BytesIO(pickle.dumps({"steps": [1, 2]}, protocol=2)), most=10)
    """
    machine = _Machine(most)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            machine.follow(opcode, argument)
    except (ValueError, LookupError, AttributeError) as error:
        raise UnpicklingError(f"it is no pickle: {error}") from error
    if machine.again > most:
        raise ValueError("its tuples, lists and dicts hold each other too often")


class _Held:
    """An object on the stack, of which only the size is known; lists and dicts still grow."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class _Machine:
    """A pickle's stack and memo, of sizes in place of objects."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.again = 0
        self._stack: list[_Held | None] = []  # None is a mark
        self._memo: dict[Any, _Held] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Do to the sizes what an instruction does to objects, until there is too much."""
        if self.again > self.most:
            return
        if opcode.name in _GETS:
            held = self._memo[argument]
            self.again += held.size - 1
            self._stack.append(held)
        elif opcode.name in _PUTS:
            self._memo[argument] = self._top()
        elif opcode.name == "MARK":
            self._stack.append(None)
        else:
            self._do(opcode, argument)

    def _do(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        size = sum(held.size for held in self._taken(opcode))
        if opcode.name in _FILLS:
            self._top().size += size
            return
        length = len(argument) if isinstance(argument, str | bytes) else 0
        new = 1 + size + length // _CHARACTERS
        self._stack += [_Held(new) for _ in opcode.stack_after]

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[_Held]:
        """What an instruction takes from the stack, without what it fills."""
        wanted = opcode.stack_before
        if pickletools.markobject in wanted:
            return self._up_to_mark()
        return [self._pop() for _ in range(len(wanted) - (opcode.name in _FILLS))]

    def _up_to_mark(self) -> list[_Held]:
        taken = []
        while (held := self._stack.pop()) is not None:
            taken.append(held)
        return taken

    def _pop(self) -> _Held:
        held = self._top()
        self._stack.pop()
        return held

    def _top(self) -> _Held:
        if (held := self._stack[-1]) is None:
            raise ValueError("a mark is used as an object")
        return held
