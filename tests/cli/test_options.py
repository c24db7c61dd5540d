import pytest
import torch

from lit_diffusion.cli.options import (
    Parser,
    SamplingOptions,
    add_checkpoint,
    add_sampling,
    integers,
    parse_sampling,
    sampling_options,
    usable_device,
)


def parse(command):
    parser = Parser("x")
    add_checkpoint(parser, required=True)
    add_sampling(parser)
    return sampling_options(*parse_sampling(parser, ["--checkpoint", "run", *command.split()]))


def test_a_parser_raises_instead_of_printing_usage(capsys):
    parser = Parser("x", "Do x.")
    parser.add_argument("--colour", required=True)
    with pytest.raises(ValueError, match="colour must be given"):
        parser.parse_args([])
    with pytest.raises(ValueError, match="Did you mean 'colour'"):
        parser.parse_args(["--colour", "red", "--color", "blue"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5", "1 2"])
def test_integers_are_separated_by_commas(text):
    parser = Parser("x")
    parser.add_argument("--steps", type=integers)
    assert parser.parse_args(["--steps", "-1,3"]).steps == [-1, 3]
    with pytest.raises(ValueError, match="must be integers such as 0,1,2"):
        parser.parse_args(["--steps", text])


def test_options_that_are_not_given_are_the_defaults_of_sampling():
    assert parse("") == SamplingOptions("run", trust=[])


@pytest.mark.parametrize("labels", ["-1", "-1,2", "2,-1"])
def test_labels_may_begin_with_none(labels):
    assert parse(f"--labels {labels}").labels == parse(f"--labels={labels}").labels == labels


def test_strength_has_a_default_where_it_is_used():
    strengths = [parse(o).strength for o in ("", "--init a", "--init a --mask b")]
    assert strengths == [None, 0.6, None]
    assert parse("--init a --strength 0.3").strength == 0.3


def test_arguments_of_solvers_are_left_as_they_are():
    options = parse("--solver Heun --solver.steps 3 --seed 1 --solver.clip=false")
    assert options.solver_options == ("--solver.steps", "3", "--solver.clip=false")
    assert (options.solver, options.seed) == ("Heun", 1)


def test_each_process_of_a_launcher_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for place, device in (("97", "cuda:97"), ("", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", place)
        asked = []
        monkeypatch.setattr(
            torch, "empty", lambda *_, device, asked=asked: asked.append(device) or torch.zeros(0)
        )
        usable_device(None)
        assert asked == [device]
    monkeypatch.undo()
    assert usable_device("cpu") == torch.device("cpu")
