import math
import os
import re

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins import MixedPrecision
from support.commands import call
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion
from support.tiny_run import tiny_config, write_config

from lit_diffusion.callbacks import FiniteUpdates, TimestepCurriculum
from lit_diffusion.checkpoints import read_checkpoint, write_checkpoint
from lit_diffusion.commands.replay import Replayed, replay

FILE = "non-finite-rank0.ckpt"


class Overflowing(TinyNetwork):
    """Its output is infinite where t >= 80."""

    def forward(self, x, noise_label, labels):
        out = super().forward(x, noise_label, labels)
        return torch.where((noise_label >= 80).view(-1, 1, 1, 1), torch.inf, out)


def made():
    return tiny_diffusion(network=Overflowing())


def failed(folder, *callbacks, module=None, data=None, **options):
    seed_everything(11)
    trainer = make_trainer(folder, *callbacks, FiniteUpdates(), **{"max_epochs": 9, **options})
    with pytest.raises(FloatingPointError):
        trainer.fit(module or made(), data or images(32, 4))
    return folder / FILE


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
    ids=lambda options: str(next(iter(options.items()), "plain")),
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


# Through the command line


def test_a_run_from_a_config_is_replayed_from_its_file_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())
    fit = "fit --config tiny.yaml --trust support --model.init_args.shift=.nan"
    assert call(fit) == 1
    assert f"`lit-diffusion replay runs/tiny/{FILE}`" in capsys.readouterr().err
    assert call(f"replay runs/tiny/{FILE}") == 2
    assert "--trust support" in capsys.readouterr().err
    assert call(f"replay runs/tiny/{FILE} --trust support") == 0
    printed = capsys.readouterr().out
    assert "first gradient that is not finite: what follows network (TinyNet)" in printed
    assert printed.rstrip().endswith("to the last bit.")


def test_a_file_of_a_module_made_in_python_says_so(tmp_path, capsys):
    assert call(f"replay {failed(tmp_path)}") == 2
    assert "build it and call" in capsys.readouterr().err


def bad_files():
    ok = {
        **dict.fromkeys(("step", "epoch", "batch_idx", "rank", "updates"), 0),
        **{"accumulate_grad_batches": 1, "threads": 1, "seed": 0},
        **{n: {} for n in ("buffers", "timesteps", "outputs", "precision_state")},
        **{"rng": {"cpu": torch.get_rng_state()}, "parameters": [], "evaluating": []},
        **{"what": "", "precision": "32-true", "device": "cpu", "torch": "2", "batch": [1]},
    }
    yield None, "is a checkpoint and no step"
    yield [], "is a checkpoint and no step"
    yield {}, "'step' must be int"
    yield {**ok, "rng": 3}, "'rng' must be dict"
    yield {**ok, "rng": {"cpu": torch.zeros(3)}}, "out of range"
    yield {**ok, "threads": 10**9}, "out of range"
    yield {**ok, "threads": 0}, "out of range"
    yield {**ok, "step": -1}, "out of range"
    yield {**ok, "seed": "x"}, "out of range"
    yield {**ok, "timesteps": {"forward": None}}, "out of range"
    yield {**ok, "updates": 2}, "had made 2 updates"


@pytest.mark.parametrize(("kept", "message"), [*bad_files()])
def test_files_of_another_kind_are_refused(tmp_path, capsys, kept, message):
    file = tmp_path / "file.ckpt"
    write_checkpoint({"state_dict": {}, **({} if kept is None else {"replay": kept})}, file)
    assert call(f"replay {file}") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("replay", "FILE must be given"),
        ("replay nowhere.ckpt", "There is no checkpoint at nowhere.ckpt"),
        (f"replay {__file__}", "truncated, damaged or no checkpoint|may hold pickled"),
    ],
)
def test_mistakes_are_told(capsys, command, message):
    assert call(command) == 2
    assert re.search(message, capsys.readouterr().err)
