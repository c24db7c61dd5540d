import pytest
import torch
from support.plain_module import PlainModule, assert_close, assert_same_bits, loader, make_trainer

from lit_diffusion import load
from lit_diffusion.callbacks import EMA, PowerEMA, StepSeed
from lit_diffusion.ema_profiles import exponent, power_decay


class Recorded(PlainModule):
    """Remembers its weights after each step."""

    def on_train_start(self):
        self.path = []

    def on_train_batch_end(self, *args):
        self.path.append({name: p.detach().clone() for name, p in self.named_parameters()})


def fit(folder, module, *callbacks, ckpt_path=None, **options):
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def by_hand(path, width):
    average = {}
    for step, weights in enumerate(path, start=1):
        keep = power_decay(exponent(width), step)
        for name, value in weights.items():
            average[name] = keep * average.get(name, 0) + (1 - keep) * value.double()
    return average


def now(module):
    return {name: p.detach().double().clone() for name, p in module.named_parameters()}


def test_the_averages_are_those_by_hand_under_their_names(tmp_path):
    module, ema = Recorded(), PowerEMA(widths=(0.05, 0.2))
    fit(tmp_path, module, ema, max_steps=12, max_epochs=-1)
    assert ema.names() == ["raw", "ema", "power_0.05", "power_0.2"]
    for name, width in {"ema": 0.05, "power_0.05": 0.05, "power_0.2": 0.2}.items():
        with ema.weights(name):
            assert_close(now(module), by_hand(module.path, width))
    assert ema.state_key == "PowerEMA{'prefix': ''}"


def test_a_resumed_run_ends_with_the_same_averages_and_snapshots(tmp_path):
    whole, first, second = (PowerEMA(snapshot_every_n_steps=4) for _ in range(3))
    fit(tmp_path / "whole", PlainModule(), whole, StepSeed(1), max_epochs=3)
    eight = fit(tmp_path / "parts", PlainModule(), first, StepSeed(1), max_epochs=2)
    eight.save_checkpoint(tmp_path / "eight.ckpt")
    rest = {"max_epochs": 3, "ckpt_path": tmp_path / "eight.ckpt"}
    fit(tmp_path / "parts", PlainModule(), second, StepSeed(1), **rest)
    for a, b in zip(*(e.state_dict()["shadows"] for e in (whole, second)), strict=True):
        assert_same_bits(a, b)
    folders = [tmp_path / name / "ema-snapshots" for name in ("whole", "parts")]
    names = [sorted(f.name for f in folder.iterdir()) for folder in folders]
    assert names[0] == names[1] == [f"step-{n:09d}.safetensors" for n in (4, 8, 12)]
    assert all((folders[0] / n).read_bytes() == (folders[1] / n).read_bytes() for n in names[0])


def test_any_width_is_loaded_from_a_run_and_its_snapshots(tmp_path):
    module, ema = Recorded(), PowerEMA(snapshot_every_n_steps=8)
    trainer = fit(tmp_path, module, ema, max_steps=64, max_epochs=-1)
    file = tmp_path / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(file)
    tracked = load(file, "power_0.1", module=PlainModule())
    assert_close(now(tracked), by_hand(module.path, 0.1))
    for width in (0.07, 0.15):
        found = now(load(file, f"power_{width}", module=PlainModule()))
        expected, nearest = by_hand(module.path, width), by_hand(module.path, 0.1)
        for name, value in expected.items():
            error = (found[name] - value).abs().max()
            assert error < 0.2 * (nearest[name] - value).abs().max() + 1e-6
    with pytest.raises(ValueError, match=r"above 0 and below 0\.289, got 0\.5"):
        load(file, "power_0.5", module=PlainModule())


def test_without_snapshots_other_widths_are_refused(tmp_path):
    trainer = fit(tmp_path, PlainModule(), PowerEMA(), max_steps=4)
    trainer.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(FileNotFoundError, match=r"holds no snapshot from step 4 on"):
        load(tmp_path / "checkpoints" / "last.ckpt", "power_0.07", module=PlainModule())


def test_what_can_not_be_averaged_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"above 0 and below 0\.289, got 0\.999"):
        PowerEMA(widths=(0.999,))
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be at least 1, got 0"):
        PowerEMA(snapshot_every_n_steps=0)
    with pytest.raises(ValueError, match="average the same parameters"):
        fit(tmp_path, PlainModule(), EMA(), PowerEMA(), max_steps=1)


def test_checkpoints_hold_the_weights_that_were_trained(tmp_path):
    module = Recorded()
    fit(tmp_path, module, PowerEMA(), max_steps=5)
    assert all(torch.equal(p, module.path[-1][n]) for n, p in module.named_parameters())
