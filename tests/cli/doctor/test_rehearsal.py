from pathlib import Path

import pytest
from support.doctor import planned, rehearse
from support.small_digits import small_digits

from lit_diffusion.cli.doctor.rehearsal import started

pytestmark = pytest.mark.usefixtures("folder")


def test_a_rehearsal_writes_nothing():
    rehearse(small_digits(8))
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("setting", ["devices=[0,1,0,1]", "precision=64-false"])
def test_what_the_trainer_refuses_is_kept_and_the_rest_built(setting):
    option = f"--trainer.{setting}"
    if "precision" in setting:
        with pytest.raises(ValueError, match="precision"):
            rehearse(small_digits(8), option)
        return
    cli = rehearse(small_digits(8), "--trainer.accelerator=gpu", option)
    assert cli.refusal
    assert cli.ranks().devices == 4
    assert cli.trainer.world_size == 4  # of the one that stands in
    assert planned(small_digits(8), "--trainer.accelerator=gpu", option).steps == 8


def test_a_trial_is_rehearsed_as_the_run_without():
    cli = rehearse(small_digits(8), "--trainer.fast_dev_run=2")
    assert cli.was_trial
    assert cli.trainer.max_steps == 8


def test_a_mistake_in_the_config_is_raised_as_in_a_fit():
    with pytest.raises(ValueError, match="max_stepz"):
        rehearse(small_digits(8), "--trainer.max_stepz=3")


def test_the_start_of_a_fit_ends_without_a_trace():
    cli = rehearse(small_digits(8))
    with started(cli):
        assert cli.model.trainer is cli.trainer
    assert cli.model._trainer is None
    assert cli.datamodule.trainer is None


def test_a_network_of_which_nothing_is_said_has_the_classes_of_its_module():
    config = small_digits(8)
    del config["model"]["init_args"]["network"]["init_args"]["num_classes"]
    cli = rehearse(config)
    assert cli.model.network.num_classes == cli.model.num_classes == 10
    assert cli.model.hparams["network"]["init_args"]["num_classes"] == 10
