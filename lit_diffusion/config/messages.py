"""What a person reads when a config or command line is wrong: the name, and what to write."""

import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

_KEY = re.compile(r'^Parser key "([^"]+)":')
_CHOICES = re.compile(r"- Expected a typing\.Literal\[([^]]*)\]")
_CLASS = re.compile(r"class_path[= ]'([\w.]+)'")


def innermost(error: BaseException, options: Iterable[str] = ()) -> str:
    """The innermost cause of an error of jsonargparse, with the path to it, in one or two lines.

    jsonargparse reports a wrong name three classes deep as every alternative at every level; the
    exception that started it says it in a line, and those between give the keys on the way. Of
    `options`, which the parser accepts, some may be suggested.
    """
    chain = _chain(error)
    keys = list(dict.fromkeys(m[1] for e in chain if (m := _KEY.match(str(e)))))
    owners = [m for e in chain for m in _CLASS.findall(str(e))[-1:]]
    where = ".".join(keys)
    cause = _cause(chain, owners[-1] if owners else "", list(options))
    return f"{where}: {cause}" if where else cause


def is_meant(
    error: BaseException, packages: Sequence[str] = ("lit_diffusion", "lightning")
) -> bool:
    """Whether an error is the message of a check in one of the packages, and no accident in code.

    A check ends in a `raise` statement; an accident in whatever statement it befell. What the
    system says of a file, with its name, or of memory, is as good as a check.
    """
    of_system = isinstance(error, OSError) and error.filename is not None
    if of_system or is_out_of_memory(error) or type(error).__name__ == "MisconfigurationException":
        return True
    if error.__traceback__ is None:
        return False
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    line = linecache.getline(frame.f_code.co_filename, number)
    return package in packages and line.strip().startswith("raise ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a machine or GPU has not enough memory for what was asked."""
    named = {kind.__name__ for kind in type(error).__mro__} & {"MemoryError", "OutOfMemoryError"}
    return bool(named) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    chain, seen = [], error
    while seen is not None:
        chain.append(seen)
        before = None if seen.__suppress_context__ else seen.__context__
        seen = seen.__cause__ or before  # type: ignore[assignment]
    return chain


def _cause(chain: list[BaseException], owner: str, options: list[str]) -> str:
    text = " ".join(str(chain[-1]).split())
    if m := re.match(r"Option '([^']+)' is not accepted", text):
        return _unknown(m[1], parameters(owner), f"{owner} has no argument")
    if m := re.search(r"does not accept option '([^']+)'", text):
        return _unknown(m[1], options, "there is no setting")
    if m := re.match(r"unrecognized arguments: (.*)", text):
        name = m[1].split("=")[0].split()[0].lstrip("-")
        if name.endswith((".yaml", ".yml")):
            return f"{name} stands alone; write --config {name}."
        return _unknown(name, options, "there is no option")
    if m := re.match(r"the following arguments are required: (.*)", text):
        whose = f" by {owner}" if owner else ""
        return f"{m[1]} must be given{', needed' + whose if whose else ''}."
    if m := re.match(r"Expected a dot import path string: (\w+)", text):
        from lit_diffusion.config.short_names import short_names

        return _unknown(m[1], list(short_names()), "there is no class")
    if m := re.match(r"Importing '([^']+)' is not allowed", text):
        return _distrusted(m[1])
    if choices := _CHOICES.findall(str(chain[0])):
        listed = f"one of {', '.join(dict.fromkeys(choices))}"
        text = re.sub(r"typing\.Literal\[[^]]*\]", listed, text)
        if listed not in text:
            text = re.sub(r"^(Expected a <class '\w+'>)", rf"\1 or {listed}", text)
    return _readable(text)


def _distrusted(path: str) -> str:
    from lit_diffusion.config.trust import TRUSTED, within

    root = path.split(".")[0]
    if parts := [package for package in TRUSTED if within(package, [root])]:
        return f"{path} is not imported: of {root}, only classes in {', '.join(parts)} are."
    return (
        f"{path} is not imported: class paths may name parts of lit_diffusion, torch, torchvision "
        f"and lightning. If you trust it, add --trust {root}."
    )


def _unknown(name: str, known: list[str], rule: str) -> str:
    for wrong in (name, name.split(".")[-1]):
        if close := get_close_matches(wrong, known, n=1):
            return f"{rule} '{name}'. Did you mean '{close[0]}'?"
    if 0 < len(known) <= 30:
        return f"{rule} '{name}'; it has {', '.join(known)}."
    return f"{rule} '{name}'."


def parameters(class_path: str) -> list[str]:
    """Names that a class takes, with its bases; none for one that is not imported already."""
    module, _, name = class_path.rpartition(".")
    found: Any = getattr(sys.modules.get(module), name, None)
    if found is None:
        return []
    classes = inspect.getmro(found) if inspect.isclass(found) else (found,)
    signatures = [inspect.signature(c) for c in classes if c is not object]
    skip = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    taken = [p.name for s in signatures for p in s.parameters.values() if p.kind not in skip]
    return list(dict.fromkeys(taken))


def _readable(text: str) -> str:
    """Python's names for types, without the angle brackets."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = text.replace("Expected a one of", "Expected one of")
    text = text.replace("Expected a int", "Expected an int")
    return re.sub(r"\. Got value: (.*)$", r", got \1.", text)
