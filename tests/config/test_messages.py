from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lit_diffusion.config.messages import (
    describe_error,
    explain_parse_error,
    is_user_error,
    parameter_names,
)
from lit_diffusion.config.trust import allow_class_paths
from lit_diffusion.metrics.images import read_image


class Block(nn.Module):
    def __init__(self, width: int, act: nn.Module | None = None) -> None:
        super().__init__()


class Model(nn.Module):
    def __init__(self, block: nn.Module, optimizer: Callable[[Iterable], Optimizer]) -> None:
        super().__init__()


PATH = f"{__name__}.Block"
ADAM = "torch.optim.Adam"


def message(**init_args: object) -> str:
    spec = {"class_path": f"{__name__}.Model", "init_args": init_args}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model")
    with allow_class_paths([__name__.split(".")[0]]), pytest.raises(ArgumentError) as error:
        parser.parse_object({"model": spec})
    return explain_parse_error(error.value)


def block(**init_args: object) -> dict:
    return {"class_path": PATH, "init_args": init_args}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"block": block(widht=3)}, ["model.block: ", f"{PATH} has no", "'widht'. Did", "'width'"]),
        ({"block": block(colour=3)}, ["no argument 'colour'; it has width, act."]),
        ({"block": block(width="wide")}, ["model.block.width: Expected an int, got wide."]),
        ({"block": block()}, ["model.block: width must be given, needed by", PATH]),
        (
            {"optimizer": {"class_path": ADAM, "init_args": {"lrr": 0.1}}},
            ["model.optimizer", "'lr'"],
        ),
        (
            {"block": {"class_path": "stranger.Net"}},
            ["stranger.Net is not imp", "--trust stranger."],
        ),
        ({"optimizer": "torch.hub.load"}, ["is not imported: of torch, only classes in torch.nn"]),
    ],
)
def test_the_innermost_cause_is_named_with_its_place_and_a_remedy(arguments, parts):
    text = message(**{"block": block(width=1), "optimizer": ADAM} | arguments)
    assert all(part in text for part in parts)
    assert "trust torch" not in text


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--precision=8", "precision: Expected one of 16, 32, 'bf16', 'half', got 8."),
        (
            "--trainer.max_stepz=3",
            "no option 'trainer.max_stepz'. Did you mean 'trainer.max_steps'?",
        ),
        ("more.yaml", "more.yaml belongs to no option; write --config more.yaml."),
    ],
)
def test_choices_and_the_nearest_option_are_named(argument, text):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--precision", type=Literal[16, 32] | Literal["bf16", "half"])
    parser.add_argument("--trainer.max_steps", type=int)
    with pytest.raises(ArgumentError) as error:
        parser.parse_args([argument])
    assert text in explain_parse_error(error.value, ["trainer.max_steps", "config"])


def test_parameters_are_not_looked_up_by_importing():
    assert parameter_names("this.is.not.imported") == []
    assert "width" in parameter_names(PATH)


def check():
    raise ValueError("too few")


def accident():
    return [][1]


def caught(function: Callable) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


def test_checks_and_errors_of_the_system_are_distinguished_from_bugs():
    ours = [__name__.split(".")[0]]
    assert is_user_error(caught(check), ours)
    assert not is_user_error(caught(accident), ours)
    assert not is_user_error(caught(check))
    assert not is_user_error(ValueError("never raised"))
    assert is_user_error(caught(Path("no such file").read_text))
    assert is_user_error(MemoryError())


def test_errors_of_the_system_say_what_to_do():
    with pytest.raises(OSError, match="No space") as caught, open("/dev/full", "w") as file:
        file.write("text")
    assert is_user_error(caught.value)
    assert describe_error(caught.value).startswith("No space left on device; free some space there")
    missing = FileNotFoundError(2, "No such file or directory", "a/b")
    assert describe_error(missing) == "a/b: No such file or directory; check the path."
    assert describe_error(ValueError("steps must be > 0.")) == "steps must be > 0."
    assert not is_user_error(ConnectionResetError(104, "Connection reset by peer"))


class Unreadable(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return read_image(Path("broken.png"))


def test_a_check_that_fails_in_a_worker_is_reported_as_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.png").write_bytes(b"no picture")
    error = caught(lambda: list(DataLoader(Unreadable(), num_workers=1)))
    assert is_user_error(error)
    assert describe_error(error) == str(caught(lambda: read_image(Path("broken.png"))))
