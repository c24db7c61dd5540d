"""Drop the arguments of a class if a later config or option names a different class."""

import sys
from typing import Any

from jsonargparse import Namespace
from jsonargparse._typehints import ActionTypeHint
from torch import nn


def drop_arguments_of_other_class(previous: Any, spec: Any) -> str | None:
    """Remove the arguments of `previous`, in place, if `spec` names a different class.

    jsonargparse alone would keep each argument that the new class also has. For example, it would
    pass the time grid of the earlier solver to the new solver. Two import paths of one class count
    as the same class. If the earlier class is an nn.Module and `spec` names a subclass of it, such
    as `MeanFlow` after `DiffusionModule`, the arguments stay.

    Args:
        previous: class path and arguments in the earlier configs and options; None if these name no
            class.
        spec: class path and arguments in the later config or option.

    Returns:
        A message that lists the removed arguments that the new class also has. Arguments that
        `spec` sets are left out, and so are arguments whose removed value is the default of the new
        class. None if no argument remains.
    """
    if not previous or not previous.get("class_path") or "init_args" not in previous:
        return None
    old, new = previous["class_path"], spec["class_path"]
    old_class, new_class = _imported_class(old), _imported_class(new)
    are_classes = isinstance(old_class, type) and isinstance(new_class, type)
    if are_classes and issubclass(new_class, old_class) and issubclass(old_class, nn.Module):
        return None
    if old_class == new_class:
        return None
    arguments = previous["init_args"]
    keys = [key for key, _ in arguments.items(branches=True, nested=False)]
    dropped = {key: arguments.pop(key) for key in keys}
    previous.pop("dict_kwargs", None)
    types: Any = ActionTypeHint
    parser = types.get_class_parser(new, sub_add_kwargs={"fail_untyped": False})
    defaults = {action.dest: action.default for action in parser._actions}
    repeated = vars(spec["init_args"]).keys() if "init_args" in spec else ()
    lost = [
        f"{key}={_describe(value)}"
        for key, value in dropped.items()
        if key in defaults and key not in repeated and value != defaults[key]
    ]
    if not lost:
        return None
    return (
        f"{new.rpartition('.')[2]} replaces {old.rpartition('.')[2]}, whose {', '.join(lost)} no "
        f"longer {'applies' if len(lost) == 1 else 'apply'}; set again what you want to keep."
    )


def _imported_class(path: str) -> Any:
    """The class that jsonargparse has imported from a path; the path itself if there is none."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, path)


def _describe(value: Any) -> str:
    """Format a setting as Python code, such as LogSNR(noisiest=-10.0)."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if not isinstance(value, dict) or "class_path" not in value:
        return repr(value)
    name, arguments = value["class_path"].rpartition(".")[2], value.get("init_args") or {}
    return f"{name}({', '.join(f'{key}={_describe(each)}' for key, each in arguments.items())})"
