import math
import os

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.failing_step import failed, made
from support.plain_module import PlainModule, loader

from lit_diffusion.callbacks import TimestepCurriculum
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.replaying import Replayed, replay


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 3},
        scaled(),
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_step_is_computed_again_to_the_last_bit(tmp_path, options):
    found = replay(failed(tmp_path, **options), module=made())
    assert found.is_exact
    assert found.failed
    bad = found.outputs["t"] >= 80
    assert torch.equal(~found.outputs["per_sample_loss"].isfinite(), bad)
    assert 0 < bad.sum() < 4
    assert found.first_output == "network (Overflowing)"


def test_a_curriculum_of_the_run_is_that_of_the_step(tmp_path):
    file = failed(tmp_path, TimestepCurriculum(6, mean=0.9, std=0.1))
    assert read_checkpoint(file)["replay"]["timesteps"]["timestep_density"] is not None
    assert replay(file, module=made()).is_exact


def test_the_seed_and_threads_of_a_session_are_left_as_they_were(tmp_path, monkeypatch):
    file = failed(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    module, threads = made(), torch.get_num_threads()
    before = torch.get_rng_state()
    assert replay(file, module=module).is_exact
    assert os.environ["PL_GLOBAL_SEED"] == "5"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_a_change_of_the_module_is_told(tmp_path):
    file = failed(tmp_path)
    content = read_checkpoint(file)
    content["replay"]["batch"][0].fill_(255)
    write_checkpoint(content, file)
    found = replay(file, module=made())
    assert not found.is_exact
    assert "These are not the run's numbers (torch" in found.text()


def test_what_is_printed_names_samples_levels_parts_and_parameters(tmp_path):
    found = replay(failed(tmp_path), module=made())
    text = found.text()
    bad = int((found.outputs["t"] >= 80).nonzero()[0])
    index, t = int(found.kept["batch"][2][bad]), float(found.outputs["t"][bad])
    (row,) = [line.split() for line in text.splitlines() if line.startswith(f"{bad:>6} ")]
    assert (int(row[0]), int(row[1]), float(row[3]), row[4]) == (bad, index, t, "inf")
    assert row[5:] == ["<-", "not", "finite"]
    assert text.count("<- not finite") == int((found.outputs["t"] >= 80).sum())
    assert "first output that is not finite: network (Overflowing)" in text
    assert "first gradient that is not finite: what follows network (Overflowing)" in text
    assert text.endswith("These are the run's numbers to the last bit.")


class Root(PlainModule):
    """The gradient of its last layer is not finite, of a loss that is."""

    def training_step(self, batch, batch_idx):
        zero = (self.inner[3].weight.sum() * 0) if batch_idx == 2 else torch.ones(())
        return super().training_step(batch, batch_idx) + (zero * zero).sqrt()


def test_of_any_module_a_gradient_is_traced(tmp_path):
    file = failed(tmp_path, module=Root(), data=loader())
    found = replay(file, module=Root())
    assert found.parameters == ["inner.3.weight"]
    assert found.first_output is None
    assert found.first_gradient == "inner.3 (Linear)"
    assert (found.is_exact, found.failed) == (True, True)
    assert "sample" not in found.text()
    assert "of inner.3.weight" in found.text()


def test_manual_optimization_is_replayed_where_the_first_update_failed(tmp_path):
    class Manual(Root):
        def __init__(self, first=True):
            super().__init__()
            self.automatic_optimization, self.first = False, first

        def training_step(self, batch, batch_idx):
            for i in range(2):
                self.zero_grad()
                fails = batch_idx == 2 and (i == 0) == self.first
                loss = PlainModule.training_step(self, batch, batch_idx)
                self.manual_backward(loss * (math.nan if fails else 1.0))
                self.optimizers().step()

    file = failed(tmp_path, module=Manual(), data=loader())
    found = replay(file, module=Manual())
    assert found.parameters[0] == "inner.0.weight"
    assert found.failed
    file = failed(tmp_path, module=Manual(first=False), data=loader())
    with pytest.raises(ValueError, match="had made 1 updates before"):
        replay(file, module=Manual(first=False))


def replayed(**changes):
    kept = {"outputs": {"loss": torch.tensor(1.0)}, "parameters": [], "device": "cpu"}
    options = {"device": "cpu", "outputs": {"loss": torch.tensor(1.0)}, "parameters": []}
    kept |= {"what": "it is so", "batch": None, "torch": "1"}
    return Replayed(kept, **{**options, "first_output": None, "first_gradient": None, **changes})


def test_it_did_not_happen_again_where_all_is_finite():
    assert not replayed().failed
    assert replayed(parameters=["a"]).failed
    assert replayed(outputs={"loss": torch.tensor(math.inf)}).failed


def test_other_numbers_are_not_the_same_ones():
    assert replayed().is_exact
    for other in (1.0000001, math.nan):
        assert not replayed(outputs={"loss": torch.tensor(other)}).is_exact
    assert not replayed(outputs={}).is_exact
    assert not replayed(outputs={"loss": torch.tensor(1.0).double()}).is_exact
    assert "of cpu: on cuda other random" in replayed(outputs={}, device="cuda").text()
