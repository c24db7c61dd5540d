"""Runs that meet what is not finite: on ranks, and from the command line."""

import math
import re
from pathlib import Path

import pytest
import torch
from support.commands import call, checkpoint
from support.plain_module import make_trainer
from support.small_digits import small_digits
from support.spawn import spawn
from support.tiny_diffusion import images, tiny_diffusion
from support.tiny_run import write_config

from lit_diffusion import load
from lit_diffusion.callbacks import EMA, FiniteUpdates, finite_updates
from lit_diffusion.cli.loggers import read_rows


def train(folder, kind, rank, max_nonfinite_steps, defers=False):
    """Train on two ranks, one of which meets what is not finite in its third batch.

    Args:
        kind: "loss", "constant" (a loss that is not finite, with a gradient that is) or "gradient".
        defers: whether the device skips updates, and the host notices later.

    Returns:
        The error; how many updates were skipped; after each step the sums of weights, optimizer
        state and averages.
    """
    finite_updates._DEFERRING_DEVICES = ("cpu",) if defers else ()
    module = tiny_diffusion(optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, fused=defers))
    original, states = module.per_sample_loss, []

    def per_sample_loss(x0, labels, t, noise, step=None):
        losses = original(x0, labels, t, noise, step)
        if step != 2 or module.global_rank != rank:
            return losses
        first = torch.arange(len(losses)) == 1
        if kind == "loss":
            return torch.where(first, losses * math.nan, losses)
        if kind == "constant":
            return torch.where(first, math.inf, losses)
        zero = module.network.leave.bias.sum() * 0
        return losses + (zero * zero).sqrt()

    def record_state(*hook_arguments):
        optimizer = trainer.optimizers[0].state_dict()["state"]
        tensors = [p.detach() for p in module.parameters()]
        tensors += [value for entry in optimizer.values() for value in entry.values()]
        tensors += ema.state_dict()["shadows"][0].values()
        states.append([tensor.double().sum().item() for tensor in tensors])

    module.per_sample_loss = per_sample_loss
    module.on_train_batch_end = record_state
    ema, guard = EMA((0.9,)), FiniteUpdates(max_nonfinite_steps)
    trainer = make_trainer(folder, ema, guard, devices=2, strategy="ddp", max_epochs=1)
    try:
        trainer.fit(module, images(32, 4))
    except FloatingPointError as error:
        record_state()
        return str(error), guard.skipped_updates, states
    return None, guard.skipped_updates, states


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("loss", 0), ("gradient", 1)])
def test_two_ranks_skip_an_update_that_is_bad_on_one(tmp_path, kind, rank):
    first, second = spawn(train, 2, tmp_path, kind, rank, 1)
    assert first == second
    error, skipped, states = first
    assert (error, skipped) == (None, 1)
    assert states[1] == states[2] != states[3]
    assert all(math.isfinite(number) for number in states[-1])
    suspects = [0, 1] if kind == "gradient" else [rank]
    names = {path.name for path in tmp_path.glob("*.ckpt")}
    assert names == {f"non-finite-rank{suspect}.ckpt" for suspect in suspects}


@pytest.mark.slow
@pytest.mark.parametrize("defers", [False, True])
def test_two_ranks_stop_together_and_name_the_one_that_met_it(tmp_path, defers):
    ranks = spawn(train, 2, tmp_path, "constant", 1, 0, defers)
    file = torch.load(tmp_path / "non-finite-rank1.ckpt", weights_only=True)
    index = file["non_finite"]["batch"][2]
    for error, _, states in ranks:
        assert re.search(
            rf"at optimizer step 2 \(batch 2, rank 1\): sample 1 \(data index {index[1]}\) at "
            r"u = .* t = \d+\. \S*/non-finite-rank1.ckpt holds the batch",
            error,
        )
        assert len(states) == (5 if defers else 3)
        assert all(state == states[1] for state in states[2:])


@pytest.fixture
def config(folder):
    return write_config(small_digits(4), Path("small.yaml"))


DIVERGE = "--model.init_args.optimizer.init_args.lr=1e20"
SAVE_EACH_STEP = (
    "--trainer.callbacks+=lit_diffusion.cli.last_checkpoint.LastCheckpoint "
    "--trainer.callbacks.folder=runs/small/checkpoints "
    "--trainer.callbacks.first=1 --trainer.callbacks.every_n_seconds=0"
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.* is again the checkpoint of the save before")
def test_a_run_that_diverges_is_stopped_and_its_batch_written(config, capsys):
    assert call("fit --config small.yaml") == 0
    last = Path("runs/small/checkpoints/last.ckpt")
    good = last.read_bytes()
    options = f"--ckpt_path=last --trainer.max_steps=20 {DIVERGE} {SAVE_EACH_STEP}"
    assert call(f"fit --config small.yaml {options}") == 1
    error = capsys.readouterr().err
    step, sample, index, t, file = re.search(
        r"lit-diffusion fit: the loss is not finite at optimizer step (\d+) \(batch \d+, rank 0\): "
        r"sample (\d+) \(data index (\d+)\) at u = [\d.]+ \(train/loss_q\d\), t = (\d+);.*"
        r" (\S+) holds the batch",
        error,
    ).groups()
    assert last.read_bytes() == good
    assert read_rows(Path("runs/small/metrics.csv"))[-1]["train/loss"] == "nan"

    content = torch.load(file, weights_only=True)
    outputs, data_index = content["non_finite"]["outputs"], content["non_finite"]["batch"][2]
    assert content["global_step"] == int(step)
    assert outputs["per_sample_loss"][int(sample)].isnan()
    assert (int(data_index[int(sample)]), int(outputs["t"][int(sample)])) == (int(index), int(t))
    assert all(value.isfinite().all() for value in content["state_dict"].values())
    assert load(file, weights="raw").global_step == 0  # a module, as from any checkpoint

    assert call("fit --config small.yaml --ckpt_path=last --trainer.max_steps=6") == 0
    assert checkpoint("runs/small")["global_step"] == 6


@pytest.mark.slow
def test_what_a_config_allows_takes_the_place_of_stopping_at_the_first(config, capsys):
    guard = "lit_diffusion.callbacks.finite_updates.FiniteUpdates"
    options = f"--trainer.callbacks+={guard} --trainer.callbacks.max_nonfinite_steps=2"
    assert call(f"fit --config small.yaml --trainer.max_steps=20 {options} {DIVERGE}") == 1
    error = capsys.readouterr().err
    assert re.search(r"Its update was skipped \(3 of at most 2: max_nonfinite_steps\)", error)
    rows = read_rows(Path("runs/small/metrics.csv"))
    counts = [row["train/nonfinite_steps"] for row in rows if "train/nonfinite_steps" in row]
    assert counts == ["1.0", "2.0", "3.0"]
