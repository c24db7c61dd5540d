from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn
from torch.optim import Optimizer

from lit_diffusion.config.messages import explain_parse_error, is_user_error, parameter_names
from lit_diffusion.config.trust import allow_class_paths


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


def test_a_wrong_name_deep_in_a_config_is_told_with_the_right_one():
    assert message(block=block(widht=3), optimizer=ADAM) == (
        f"model.block: {PATH} has no argument 'widht'. Did you mean 'width'?"
    )


def test_a_name_like_no_other_is_told_with_those_there_are():
    text = message(block=block(colour=3), optimizer=ADAM)
    assert "no argument 'colour'; it has width, act." in text


def test_a_wrong_type_is_told_with_the_one_expected():
    text = message(block=block(width="wide"), optimizer=ADAM)
    assert text == "model.block.width: Expected an int, got wide."


def test_a_missing_argument_is_told_with_who_needs_it():
    text = message(block=block(), optimizer=ADAM)
    assert text == f"model.block: width must be given, needed by {PATH}."


def test_a_wrong_name_behind_a_callable_is_told_with_the_right_one():
    optimizer = {"class_path": ADAM, "init_args": {"lrr": 0.1}}
    text = message(block=block(width=1), optimizer=optimizer)
    assert text == f"model.optimizer: {ADAM} has no argument 'lrr'. Did you mean 'lr'?"


def test_a_distrusted_class_path_is_told_with_the_option_that_allows_it():
    text = message(block={"class_path": "stranger.Net"}, optimizer=ADAM)
    assert text.startswith("model.block: stranger.Net is not imported")
    assert text.endswith("add --trust stranger.")


def test_a_loader_in_a_trusted_package_is_told_without_a_way_around():
    text = message(block=block(width=1), optimizer="torch.hub.load")
    assert text == (
        "model.optimizer: torch.hub.load is not imported: of torch, only classes in torch.nn, "
        "torch.optim are."
    )


def test_all_choices_of_a_union_of_literals_are_told():
    from typing import Literal

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--precision", type=Literal[16, 32] | Literal["bf16", "half"])
    with pytest.raises(ArgumentError) as error:
        parser.parse_args(["--precision=8"])
    assert (
        explain_parse_error(error.value)
        == "precision: Expected one of 16, 32, 'bf16', 'half', got 8."
    )


def test_an_unknown_option_is_told_with_the_nearest():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--trainer.max_steps", type=int)
    with pytest.raises(ArgumentError) as error:
        parser.parse_args(["--trainer.max_stepz=3"])
    assert explain_parse_error(error.value, ["trainer.max_steps", "config"]) == (
        "there is no option 'trainer.max_stepz'. Did you mean 'trainer.max_steps'?"
    )


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


def test_a_check_of_ours_is_told_from_an_accident_and_from_checks_of_others():
    assert is_user_error(caught(check), [__name__.split(".")[0]])
    assert not is_user_error(caught(accident), [__name__.split(".")[0]])
    assert not is_user_error(caught(check))
    assert not is_user_error(ValueError("never raised"))


def test_what_the_system_says_of_files_and_memory_is_as_good_as_a_check():
    assert is_user_error(caught(Path("no such file").read_text))
    assert is_user_error(MemoryError())
