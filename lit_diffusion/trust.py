"""Which packages a config or a checkpoint may name.

A class path is code to import and call, so a file from a stranger could run anything. Here, a class
path outside the packages below and those that the user names is refused before its module is
imported.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings

TRUSTED = ("lit_diffusion", "torch", "torchvision", "lightning")
"""Packages that class paths may always name."""
_LOADERS = (  # parts of the trusted packages that load and run code of others
    "torch.hub",
    "torch.load",
    "torch.serialization",
    "torch.package",
    "torch.jit",
    "torch.multiprocessing",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.launcher",
    "torch.distributed.elastic",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
    "torch.utils.bottleneck",
)


@contextmanager
def trusting(packages: Iterable[str] = ()) -> Iterator[None]:
    """Within this context, jsonargparse imports from `TRUSTED` and `packages` alone.

    Args:
        packages: dotted names of modules, or of packages with all below them.

    Raises:
        ValueError: for a name that is not dotted identifiers.

    Example:
        >>> from jsonargparse import ArgumentParser
        >>> from collections.abc import Callable
        >>> parser = ArgumentParser(exit_on_error=False)
        >>> _ = parser.add_argument("--call", type=Callable[[str], bytes])
        >>> with trusting():
        ...     parser.parse_args(["--call=mimetypes.init"])  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ArgumentError: Importing 'mimetypes.init' is not allowed, ...
    """
    before = dict(parsing_settings)
    allowed = [*TRUSTED, *packages]
    try:
        set_parsing_settings(
            import_path_denylist=["*", *_LOADERS],
            import_path_allowlist=allowed,
            instantiate_subclass_spec_in_any=False,
        )
        yield
    finally:
        parsing_settings.clear()
        parsing_settings.update(before)
