"""Explain errors in configs and command lines by short messages that suggest a fix."""

import errno
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def explain_parse_error(error: BaseException, options: Iterable[str] = ()) -> str:
    """Explain an error of jsonargparse in one or two lines, with the dotted key of the setting.

    The message of jsonargparse is long, because it lists all alternatives for each nested class.
    This function takes the cause from the innermost exception, and the key from the exceptions
    around it. If a check of this library raised an exception, its message is complete, so the
    function does not look for causes of this exception. For an unknown option, the function
    suggests the closest of the names `options`.
    """
    chain: list[BaseException] = []  # the error and its causes, the outermost first
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        if is_user_error(cause, ["lit_diffusion"]):
            break
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    texts = [str(each) for each in chain]
    keys = [m[1] for text in texts if (m := re.match(r'^Parser key "([^"]+)":', text))]
    classes = [
        path for text in texts for path in re.findall(r"class_path[= ]'([\w.]+)'", text)[-1:]
    ]
    where = ".".join(dict.fromkeys(keys))
    class_path = classes[-1] if classes else ""
    message = _translate(texts[0], " ".join(texts[-1].split()), class_path, list(options))
    return f"{where}: {message}" if where else message


def _translate(outermost: str, innermost: str, class_path: str, options: list[str]) -> str:
    """Rewrite the innermost message of jsonargparse in plain words, with a suggestion."""
    if m := re.match(r"Option '([^']+)' is not accepted", innermost):
        return suggest(m[1], parameter_names(class_path), f"{class_path} has no argument")
    if m := re.search(r"does not accept option '([^']+)'", innermost):
        return suggest(m[1], options, "there is no setting")
    if m := re.match(r"unrecognized arguments:(.*)", innermost):
        words = m[1].split("=")[0].split()
        name = words[0] if words else m[1].strip()  # "" or "=5"
        if name in ("", "--") or name[0] == "=":
            return f"the argument {name!r} belongs to no option; remove it, or the space before =."
        if name.startswith("-"):
            return suggest(name.lstrip("-"), options, "there is no option")
        option = "config" if name.endswith((".yaml", ".yml")) else "checkpoint"
        return f"{name} belongs to no option{f'; write --{option} {name}' * (option in options)}."
    if m := re.match(r"the following arguments are required: (.*)", innermost):
        return f"{m[1]} must be given{f', needed by {class_path}' if class_path else ''}."
    if m := re.match(r"Expected a dot import path string: (\w+)", innermost):
        from lit_diffusion.config.trust import short_names  # imports jsonargparse, which is slow

        return suggest(m[1], list(short_names()), "there is no class")
    if m := re.match(r"Importing '([^']+)' is not allowed", innermost):
        from lit_diffusion.config.trust import TRUSTED, is_within

        root = m[1].split(".")[0]
        if parts := [package for package in TRUSTED if is_within(package, [root])]:
            allowed = ", ".join(parts)
            return f"{m[1]} is not imported: class paths in {root} must be classes of {allowed}."
        return (
            f"{m[1]} is not imported: class paths may name classes of lit_diffusion, torch, "
            f"torchvision and lightning. If you trust {root}, add --trust {root}."
        )
    return _expected_type(outermost, innermost)


def _expected_type(outermost: str, text: str) -> str:
    """Rewrite a message about a wrong value: with all choices of a union, and plain type names."""
    if choices := re.findall(r"- Expected a typing\.Literal\[([^]]*)\]", outermost):
        listed = f"one of {', '.join(dict.fromkeys(choices))}"
        text = re.sub(r"typing\.Literal\[[^]]*\]", listed, text)
        if listed not in text:
            text = re.sub(r"^(Expected a <class '\w+'>)", rf"\1 or {listed}", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = text.replace("Expected a one of", "Expected one of")
    text = text.replace("Expected a int", "Expected an int")
    return re.sub(r"\. Got value: (.*)$", r", got \1.", text)


SYNONYMS = {"checkpoint": "ckpt_path", "ckpt_path": "checkpoint", "train": "fit"}
"""Wrong name -> valid name with the same meaning, which a message suggests."""


def suggest(name: str, names: Iterable[str], rule: str) -> str:
    """Return the message `rule` about a wrong `name`, with the closest of the valid `names`.

    The comparison ignores case. If no name is close and there are at most 30 names, the message
    lists them all.
    """
    names = list(names)
    in_lower_case = {each.lower(): each for each in names}
    for wrong in (name, name.split(".")[-1]):
        close = get_close_matches(wrong.lower(), in_lower_case, n=1)
        if SYNONYMS.get(wrong) in names:
            close = [SYNONYMS[wrong]]
        if close:
            return f"{rule} '{name}'. Did you mean '{in_lower_case[close[0]]}'?"
    if 0 < len(names) <= 30:
        return f"{rule} '{name}'; it has {', '.join(names)}."
    return f"{rule} '{name}'."


def parameter_names(class_path: str) -> list[str]:
    """Names of the arguments of a class and its bases; [] if the class is not yet imported."""
    module, _, name = class_path.rpartition(".")
    target: Any = getattr(sys.modules.get(module), name, None)
    if target is None:
        return []
    classes = inspect.getmro(target) if inspect.isclass(target) else (target,)
    signatures = [inspect.signature(c) for c in classes if c is not object]
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [p.name for s in signatures for p in s.parameters.values() if p.kind not in variadic]
    return list(dict.fromkeys(names))


FIXES = {
    errno.ENOSPC: "free some space there, or write to another disk",
    errno.EDQUOT: "free some space there, or write to another disk",
    errno.EACCES: "get the permission, or name another path",
    errno.EPERM: "get the permission, or name another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; name another path",
    errno.EISDIR: "name a file",
    errno.EMFILE: "allow more open files by `ulimit -n`",
    errno.EIO: "the disk or its connection is faulty",
}
"""Advice about an error of the operating system, by error number (errno)."""

_WORKER_ERROR = re.compile(
    r'Caught \w+ in DataLoader worker process .*  File "[^"]*/lit_diffusion/[^"]*", line \d+, in '
    r"\w+\n    raise [^\n]*\n(?:    [^\n]*\n)*[\w.]+: (.*)",
    re.DOTALL,
)
"""Matches the message of an error that a check of this library raised in a DataLoader worker."""


def is_user_error(
    error: BaseException, packages: Sequence[str] = ("lit_diffusion", "lightning")
) -> bool:
    """Whether the user can correct the cause of an error; otherwise, the error may be a bug.

    This is the case for three kinds of errors:

    - errors from a `raise` statement in one of `packages`, and Lightning's
      `MisconfigurationException`;
    - errors of the operating system with an error number, such as a full disk or a missing file,
      but not connection errors;
    - errors because the machine or the GPU is out of memory.

    In a DataLoader worker, only the `raise` statements of lit_diffusion count.
    """
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return True
    if is_out_of_memory(error) or _WORKER_ERROR.match(str(error)):
        return True
    if type(error).__name__ == "MisconfigurationException":
        return True
    if error.__traceback__ is None:
        return False
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    package = str(frame.f_globals.get("__name__")).split(".")[0]
    line = linecache.getline(frame.f_code.co_filename, number)
    return package in packages and line.strip().startswith("raise ")


def describe_error(error: BaseException) -> str:
    """Return the message of an error. For an error of the operating system, add advice."""
    if isinstance(error, OSError) and error.errno and error.strerror:
        subject = "" if error.filename is None else f"{error.filename}: "
        fix = FIXES.get(error.errno, "see to the file system, or name another path")
        return f"{subject}{error.strerror}; {fix}."
    if in_worker := _WORKER_ERROR.match(str(error)):
        return in_worker[1].strip()
    return str(error) or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the machine or GPU does not have enough memory."""
    types = {kind.__name__ for kind in type(error).__mro__}
    is_typed = bool(types & {"MemoryError", "OutOfMemoryError"})
    return is_typed or "DefaultCPUAllocator: can't allocate memory" in str(error)
