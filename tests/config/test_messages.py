from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lit_diffusion.auxiliary_losses.features import find_block
from lit_diffusion.config.messages import (
    describe_error,
    explain_parse_error,
    is_user_error,
)
from lit_diffusion.config.trust import allow_class_paths
from lit_diffusion.metrics.images import read_image


class Block(nn.Module):
    def __init__(self, width: int, act: nn.Module | None = None) -> None:
        super().__init__()


class Model(nn.Module):
    def __init__(self, block: nn.Module, optimizer: Callable[[Iterable], Optimizer]) -> None:
        super().__init__()


PATH, ADAM = f"{__name__}.Block", "torch.optim.Adam"


def block(**init_args: object) -> dict:
    return {"block": {"class_path": PATH, "init_args": init_args}}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (block(widht=3), ["model.block: ", f"{PATH} has no", "'widht'. Did", "'width'"]),
        (block(width="wide"), ["model.block.width: Expected an int, got wide."]),
        (block(), ["model.block: width must be given, needed by", PATH]),
        ({"optimizer": {"class_path": ADAM, "init_args": {"lrr": 1}}}, ["model.optimizer", "'lr'"]),
        ({"block": {"class_path": "stranger.Net"}}, ["stranger.Net is not", "--trust stranger."]),
        ({"optimizer": "torch.hub.load"}, ["torch must be classes of torch.nn"]),
    ],
)
def test_the_innermost_cause_is_named_with_its_place_and_a_remedy(arguments, parts):
    model = block(width=1) | {"optimizer": ADAM} | arguments
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model")
    with allow_class_paths([__name__.split(".")[0]]), pytest.raises(ArgumentError) as error:
        parser.parse_object({"model": {"class_path": f"{__name__}.Model", "init_args": model}})
    text = explain_parse_error(error.value)
    assert all(part in text for part in parts)
    assert "trust torch" not in text


def test_an_empty_argument_is_named():
    """As in `fit "$OPTIONS"`."""
    text = explain_parse_error(ValueError("unrecognized arguments: "))
    assert text.startswith("the argument '' belongs to no option; remove it")


def check():
    raise ValueError("too few")


def caught(function: Callable) -> Exception:
    with pytest.raises(Exception) as error:  # noqa: PT011
        function()
    return error.value


def wrap(check: Callable) -> None:
    try:
        check()
    except ValueError as error:
        raise ValueError("Does not validate against any of the Union subtypes") from error


def test_a_check_is_explained_by_its_own_message_and_not_by_its_cause():
    check = partial(find_block, nn.Sequential(nn.Linear(1, 1)), "blocks.3")
    assert explain_parse_error(caught(partial(wrap, check))) == str(caught(check))


def test_checks_and_errors_of_the_system_are_distinguished_from_bugs():
    ours = [__name__.split(".")[0]]
    assert is_user_error(caught(check), ours)
    assert not is_user_error(caught(lambda: [][1]), ours)
    assert not is_user_error(caught(check))
    assert not is_user_error(ValueError("never raised"))
    assert is_user_error(caught(Path("no such file").read_text))
    assert is_user_error(MemoryError())
    assert not is_user_error(ConnectionResetError(104, "Connection reset by peer"))


def test_a_check_that_fails_in_a_worker_is_reported_as_here(folder):
    Path("broken.png").write_bytes(b"no picture")
    loader = DataLoader([Path("broken.png")], num_workers=1, collate_fn=lambda p: read_image(p[0]))
    error = caught(lambda: list(loader))
    assert is_user_error(error)
    assert describe_error(error) == str(caught(lambda: read_image(Path("broken.png"))))
