"""What a fit ends with at its start is told before."""

from pathlib import Path

import pytest
from lightning.pytorch.strategies import FSDPStrategy
from support.commands import call
from support.doctor import clean_folder, look_at, rehearse, topics
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config

from lit_diffusion.doctor.refusals import check_callbacks
from lit_diffusion.doctor.report import Level


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def digits_with(name, steps=200, **arguments):
    config = small_digits(steps)
    spec = {"class_path": f"lit_diffusion.callbacks.{name}", "init_args": arguments}
    config["trainer"]["callbacks"].append(spec)
    return config


def digits_averaging(prefix):
    config = small_digits(200)
    config["trainer"]["callbacks"][0]["init_args"]["prefix"] = prefix
    return config


@pytest.mark.parametrize(
    ("config", "options", "topic", "told"),
    [
        (digits_with("MomentumDecay", min_beta1=0.95), [], "MomentumDecay", "min_beta1 must be"),
        (digits_averaging("nothing"), [], "EMA", "fits no parameter"),
        (digits_with("FIDEvaluation", extractor="digits-cnn", weights="ema_2", num_samples=70), [],
         "FIDEvaluation", "the callbacks provide"),
        (digits_with("FIDEvaluation", extractor="digits-cnn", num_samples=70),
         ["--trainer.limit_val_batches=0"], "FIDEvaluation", "this fit has no validation"),
        (digits_with("SampleGrid", num=4), ["--trainer.limit_val_batches=0"], "SampleGrid",
         "this fit has no validation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_callback_refuses_is_a_problem_with_its_name(config, options, topic, told, capsys):
    found = look_at(config, *options)
    assert topics(found, Level.PROBLEM) == {topic}
    assert told in found[topic].text
    assert call(" ".join(["fit --config run.yaml", *options])) == 2
    assert " ".join(found[topic].text.split()) in " ".join(capsys.readouterr().err.split())


def test_a_strategy_that_splits_weights_in_its_own_way_is_refused():
    cli = rehearse(small_digits(8))
    assert list(check_callbacks(cli, [])) == []
    cli.trainer._accelerator_connector.strategy = FSDPStrategy()  # takes a GPU to be asked for
    (finding,) = check_callbacks(cli, [])
    assert (finding.level, finding.topic) == (Level.PROBLEM, "EMA")
    assert "does not support FSDPStrategy" in finding.text


def test_a_module_that_lacks_what_a_callback_needs_is_a_problem():
    config = tiny_config()
    config["trainer"]["callbacks"] = [
        {"class_path": "lit_diffusion.callbacks.TimestepCurriculum", "init_args": {"num_steps": 4}}
    ]
    found = look_at(config, "--trust", HERE.split(".")[0])
    assert "needs a module with the attributes" in found["TimestepCurriculum"].text


def test_asking_leaves_the_module_without_a_trainer_and_writes_nothing():
    cli = rehearse(digits_with("SampleGrid", num=4))
    assert list(check_callbacks(cli, [])) == []
    assert cli.model._trainer is None
    assert cli.datamodule.trainer is None
    assert not any(p._backward_hooks for p in cli.model.parameters())
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
