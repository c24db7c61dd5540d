from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from support.plain_module import (
    PlainModule,
    assert_close,
    by_profile,
    loader,
    make_trainer,
    trainable,
)

from lit_diffusion import load
from lit_diffusion.callbacks import EMA, PowerEMA, StepSeed


class Recorded(PlainModule):
    """Remembers its weights after each step of the optimizer."""

    def on_train_start(self):
        self.path = []

    def on_train_batch_end(self, *args):
        self.path.append(trainable(self))


def fit(folder, module, *callbacks, ckpt_path=None, **options):
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def snapshots(folder):
    return sorted(int(file.stem[5:]) for file in (folder / "ema-snapshots").glob("*"))


class TwoSteps(PlainModule):
    """Steps twice in each batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()


def saved(trainer, folder):
    file = folder / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(file)
    return file


def test_the_averages_are_those_by_hand_under_their_names(tmp_path):
    module, ema = Recorded(), PowerEMA(widths=(0.05, 0.2))
    fit(tmp_path, module, ema, max_steps=12, max_epochs=-1)
    assert ema.names() == ["raw", "ema", "power_0.05", "power_0.2"]
    for name, width in {"ema": 0.05, "power_0.05": 0.05, "power_0.2": 0.2}.items():
        with ema.weights(name):
            assert_close(trainable(module), by_profile(module.path, width))
    assert ema.state_key == "PowerEMA{'prefix': ''}"


def test_a_run_that_resumes_into_another_folder_takes_its_snapshots_along(tmp_path):
    """As Lightning's loggers give each start a folder of a new version."""

    def run(version, epochs, file=None):
        ema, logger = PowerEMA(snapshot_every_n_steps=4), CSVLogger(tmp_path, name="project")
        options = {"max_epochs": epochs, "logger": logger, "ckpt_path": file}
        trainer = fit(tmp_path, PlainModule(), ema, StepSeed(1), **options)
        return saved(trainer, tmp_path / f"project/version_{version}")

    whole, first = run(0, 3), run(1, 2)
    resumed = run(2, 3, first)
    folders = [file.parent.parent for file in (whole, first, resumed)]
    assert list(map(snapshots, folders)) == [[4, 8, 12], [4, 8], [4, 8, 12]]
    undisturbed, _, again = (sorted(f.glob("ema-snapshots/*")) for f in folders)
    assert [f.read_bytes() for f in undisturbed] == [f.read_bytes() for f in again]
    load(resumed, "power_0.07", module=PlainModule())


def test_a_new_run_does_not_delete_the_snapshots_of_another(tmp_path):
    fit(tmp_path, PlainModule(), PowerEMA(snapshot_every_n_steps=4), max_steps=4)
    with pytest.raises(
        ValueError, match="ema-snapshots belongs to another run: give the Trainer a log"
    ):
        fit(tmp_path, PlainModule(), PowerEMA(snapshot_every_n_steps=4), max_steps=4)
    assert snapshots(tmp_path) == [4]


def assert_widths(file, path, widths=(0.07, 0.15)):
    """Loaded from the file and its snapshots, they are nearly the direct averages."""
    for width in widths:
        loaded = trainable(load(file, f"power_{width}", module=PlainModule()))
        expected, nearest = by_profile(path, width), by_profile(path, 0.1)
        for name, value in expected.items():
            error = (loaded[name] - value).abs().max()
            assert error < 0.2 * (nearest[name] - value).abs().max() + 1e-6


def test_any_width_is_loaded_from_a_run_and_its_snapshots(tmp_path, monkeypatch):
    module, ema = Recorded(), PowerEMA(snapshot_every_n_steps=8)
    file = saved(fit(tmp_path, module, ema, max_steps=64, max_epochs=-1), tmp_path)
    for name in ("power_0.1", "power_0.10"):
        assert_close(
            trainable(load(file, name, module=PlainModule())), by_profile(module.path, 0.1)
        )
    assert_widths(file, module.path)
    monkeypatch.chdir(Path(file).parent)
    assert_widths(Path(file).name, module.path)
    with pytest.raises(ValueError, match=r"above 0 and below 0\.289, got 0\.5"):
        load(file, "power_0.5", module=PlainModule())
    with pytest.raises(ValueError, match=r"must be power_<width>, got 'power_wide'"):
        load(file, "power_wide", module=PlainModule())


def test_snapshots_that_were_put_there_from_another_run_are_refused(tmp_path):
    files = {}
    for name, lr in {"one": 0.1, "two": 0.3}.items():
        ema = PowerEMA(snapshot_every_n_steps=4)
        trainer = fit(tmp_path / name, PlainModule(lr=lr), ema, max_steps=12, max_epochs=-1)
        files[name] = saved(trainer, tmp_path / name)
    load(files["one"], "power_0.07", module=PlainModule())
    stranger = "ema-snapshots/step-000000008.safetensors"
    (tmp_path / "one" / stranger).write_bytes((tmp_path / "two" / stranger).read_bytes())
    with pytest.raises(ValueError, match=r"8\.safetensors is not the snapshot .* at step 8"):
        load(files["one"], "power_0.07", module=PlainModule())


def test_a_run_that_goes_on_from_before_a_snapshot_takes_it_anew(tmp_path):
    trainer = fit(tmp_path, PlainModule(), PowerEMA(snapshot_every_n_steps=1), max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    rest = {"max_steps": 4, "max_epochs": -1, "ckpt_path": tmp_path / "two.ckpt"}
    fit(tmp_path, PlainModule(), PowerEMA(snapshot_every_n_steps=1), **rest)
    assert snapshots(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_goes_on_from_just_before_a_snapshot_takes_it_too(tmp_path):
    """As from best-fid.ckpt, which FIDEvaluation may write before the snapshot of its step."""
    file = tmp_path / "checkpoints" / "four.ckpt"
    saver = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: (
            trainer.save_checkpoint(file) if trainer.global_step == 4 else None
        )
    )
    fit(tmp_path, PlainModule(), saver, PowerEMA(snapshot_every_n_steps=4), max_epochs=2)
    resumed = PowerEMA(snapshot_every_n_steps=4)
    trainer = fit(tmp_path, PlainModule(), resumed, max_epochs=3, ckpt_path=file)
    assert snapshots(tmp_path) == [4, 8, 12]
    load(saved(trainer, tmp_path), "power_0.07", module=PlainModule())


def test_a_snapshot_is_taken_after_the_batch_that_reaches_or_passes_its_step(tmp_path):
    fit(tmp_path, TwoSteps(), PowerEMA(snapshot_every_n_steps=3), max_steps=12, max_epochs=-1)
    assert snapshots(tmp_path) == [4, 6, 10, 12]


def test_fast_dev_run_writes_no_snapshots(tmp_path):
    fit(tmp_path, PlainModule(), PowerEMA(snapshot_every_n_steps=1), fast_dev_run=2)
    assert not (tmp_path / "ema-snapshots").exists()


def test_without_snapshots_other_widths_are_refused(tmp_path):
    file = saved(fit(tmp_path, PlainModule(), PowerEMA(), max_steps=4), tmp_path)
    with pytest.raises(ValueError, match=r"step 4 cannot be reconstructed from 0 snapshots"):
        load(file, "power_0.2", module=PlainModule())
    file = saved(fit(tmp_path, PlainModule(), EMA(), max_steps=4), tmp_path)
    with pytest.raises(ValueError, match=r"no weights 'power_0.07'; it has raw, ema_0.9999"):
        load(file, "power_0.07", module=PlainModule())


def test_a_width_that_would_begin_in_the_middle_is_refused(tmp_path):
    trainer = fit(tmp_path, PlainModule(), PowerEMA(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    rest = {"max_steps": 4, "ckpt_path": tmp_path / "two.ckpt"}
    with pytest.raises(ValueError, match=r"width 0\.07 would lack the steps before; keep the"):
        fit(tmp_path, PlainModule(), PowerEMA((0.05, 0.07)), **rest)
    fit(tmp_path, PlainModule(), PowerEMA((0.1,)), **rest)


def test_what_can_not_be_averaged_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"above 0 and below 0\.289, got 0\.999"):
        PowerEMA(widths=(0.999,))
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be at least 1, got 0"):
        PowerEMA(snapshot_every_n_steps=0)
    with pytest.raises(ValueError, match="average the same parameters"):
        fit(tmp_path, PlainModule(), EMA(), PowerEMA(), max_steps=1)
    two = (PowerEMA(prefix=f"inner.{i}", snapshot_every_n_steps=1) for i in (0, 3))
    with pytest.raises(ValueError, match="two PowerEMA would write snapshots with the same names"):
        fit(tmp_path, PlainModule(), *two, max_steps=1)
