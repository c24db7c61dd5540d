"""Each check, on a run that it must object to and on one that it must not."""

import copy
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from support.commands import call
from support.plain_module import make_trainer
from support.small_digits import small_digits
from support.tiny_run import HERE, TinyData, TinyModule, TinyNet, spec, tiny_config
from torch import optim
from torch.utils.data import DataLoader, DistributedSampler

from lit_diffusion.callbacks import EMA, FIDEvaluation, PowerEMA, SampleGrid
from lit_diffusion.cli.doctor import checks
from lit_diffusion.cli.doctor import run as doctor_run
from lit_diffusion.cli.doctor.checks import Level, examine
from lit_diffusion.cli.doctor.run import Stopwatch
from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.grids import LogSNR
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.lr_schedules import WarmupConstant
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, EDMProcess, LinearBetas
from lit_diffusion.solvers import DDIM

TRUST = ["--trust", HERE.split(".")[0]]


def findings(config, *options, seconds=0.0):
    """The most serious finding on each topic; without time, only samples are timed."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    by_topic = {}
    for finding in examine(["--config", "run.yaml", *options], seconds):
        if finding.topic not in by_topic or finding.level > by_topic[finding.topic].level:
            by_topic[finding.topic] = finding
    return by_topic


def topics(by_topic, level=Level.PROBLEM):
    return {topic for topic, finding in by_topic.items() if finding.level is level}


def require(finding, level, text):
    assert finding.level is level
    assert text in finding.text


def digits(steps=2000, model=(), callbacks=(), **trainer):
    """small_digits with other arguments of the module, and further callbacks."""
    config = small_digits(steps, check_val_every_n_epoch=None, val_check_interval=500)
    config["trainer"].update(trainer)
    config["trainer"]["callbacks"] += callbacks
    config["model"]["init_args"]["lr_scheduler"]["init_args"].pop("total_steps")
    config["model"]["init_args"].update(model)
    return config


def examined_run(config, *options):
    """The run that the checks read."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", (lambda run: iter(runs.append(run) or ()),))
        findings(config, *options)
    return runs[0]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("digits"))
        return examined_run(digits())


@pytest.fixture
def run(digits_run):
    """2,000 steps of 64 images, a validation of 360 every 500; to be changed by a test."""
    changed = copy.copy(digits_run)
    changed.trainer = copy.copy(changed.trainer)
    changed.module = copy.copy(changed.module)
    changed.cli = SimpleNamespace(num_devices=1, num_nodes=1)
    return changed


# Whole examinations


def test_a_sound_config_has_no_problem_and_no_warning():
    grid = spec("lit_diffusion.callbacks.SampleGrid", num=4)
    by_topic = findings(digits(callbacks=[fid(batch_size=8), grid]))
    assert topics(by_topic) | topics(by_topic, Level.WARNING) == set()
    text = "2,000 optimizer steps of 64 images, 90.9 epochs of 1,437"
    require(by_topic["length"], Level.OK, text)
    require(by_topic["time"], Level.NOTE, "extrapolated from")
    expected = {"validation", "lr", "EMA", "terminal SNR", "label dropout", "disk"}
    assert expected <= by_topic.keys()
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
    assert torch.is_grad_enabled()


def fid(**arguments):
    arguments = {"num_samples": 360, "extractor": "digits-cnn", **arguments}
    return spec("lit_diffusion.callbacks.FIDEvaluation", **arguments)


def test_a_module_of_another_package_is_examined():
    by_topic = findings(tiny_config(max_steps=50), *TRUST, seconds=30.0)
    assert topics(by_topic) == set()
    require(by_topic["length"], Level.OK, "50 optimizer steps of 4 images")
    require(by_topic["time"], Level.NOTE, "measured on")


def test_a_trainer_that_is_refused_leaves_the_other_checks():
    options = ["--trainer.accelerator=gpu", "--trainer.devices=[0,1]"]
    by_topic = findings(tiny_config(max_steps=50), *TRUST, *options)
    assert topics(by_topic) == {"trainer"}
    require(by_topic["length"], Level.OK, "50 optimizer steps of 8 images")


def test_what_a_callback_refuses_at_the_start_of_a_fit_is_a_problem():
    by_topic = findings(digits(callbacks=[fid(weights="ema_2")]))
    assert topics(by_topic) == {"fit"}
    assert "the callbacks provide" in by_topic["fit"].text


def test_pictures_that_are_too_small_are_a_problem():
    for split, height in (("train", 6), ("val", 8)):
        Path(split).mkdir()
        for i in range(4):
            Image.new("L", (8, height)).save(f"{split}/{i}.png")
    config = tiny_config()
    arguments = {"image_size": 8, "channels": 1, "batch_size": 4, "cache_dir": "cache"}
    folders = {"train": "train", "val": "val"}
    config["data"] = spec("lit_diffusion.data.image_folder.ImageFolder", **folders, **arguments)
    require(findings(config, *TRUST)["fit"], Level.PROBLEM, "0.png")


def test_data_that_would_be_downloaded_are_not():
    """Nor is `prepare_data` of another package called."""
    config = digits()
    config["data"] = spec("lit_diffusion.data.cifar10.CIFAR10")
    by_topic = findings(config)
    require(by_topic["data"], Level.WARNING, f"{CIFAR10.source.filename} will be downloaded")
    assert {"length", "disk", "time", "EMA", "terminal SNR"} <= by_topic.keys()
    assert not Path("data").exists()
    by_topic = findings(tiny_config() | {"data": {"class_path": f"{HERE}.PreparedData"}}, *TRUST)
    require(by_topic["data"], Level.WARNING, "PreparedData.prepare_data")


def test_weights_of_fid_that_are_missing_are_a_problem_and_the_run_is_started(monkeypatch):
    """As is a network that cannot sample."""

    def forward(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("lit_diffusion.networks.unet.UNet.forward", forward)
    callbacks = [fid(num_samples=1000, extractor="inception-v3-compat")]
    by_topic = findings(digits(callbacks=callbacks))
    assert topics(by_topic) >= {"FID weights", "sampling"}
    assert "lit-diffusion fetch-weights" in by_topic["FID weights"].text
    assert "no memory" in by_topic["sampling"].text
    require(by_topic["length"], Level.OK, "epochs of 1,437")


@pytest.mark.slow
def test_a_resume_counts_what_is_left_and_leaves_the_folder_alone():
    Path("run.yaml").write_text(yaml.safe_dump(digits(4, val_check_interval=4)))
    assert call("fit --config run.yaml") == 0
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    saved = torch.load("runs/run/checkpoints/last.ckpt", weights_only=True)
    assert "already holds a run" in findings(digits(90))["config"].text
    by_topic = findings(digits(12), "--ckpt_path=last", seconds=30.0)
    assert topics(by_topic) == set()
    require(by_topic["length"], Level.OK, "of which 4 are done")
    require(by_topic["time"], Level.NOTE, "measured on")
    predicted = float(by_topic["disk"].text.split("checkpoints of ")[1].split()[0])
    assert predicted == pytest.approx(tensor_bytes(saved) / 1e9, rel=0.01)
    width = "--model.init_args.network.init_args.model_channels=16"
    by_topic = findings(digits(90), "--ckpt_path=last", width)
    require(by_topic["fit"], Level.PROBLEM, "a different architecture")
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


def tensor_bytes(value):
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value
    return sum(map(tensor_bytes, parts)) if isinstance(value, dict | list | tuple) else 0


# Counting


class Count(Callback):
    num_validations = 0

    def on_validation_end(self, *_):
        self.num_validations += 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 4, "accumulate_grad_batches": 3},
        {"max_epochs": 6, "check_val_every_n_epoch": 2, "val_check_interval": 0.5},
        {"max_epochs": 3, "val_check_interval": 3},
        {"max_steps": 9, "limit_val_batches": 0},
        {"max_steps": 9, "val_check_interval": 6, "check_val_every_n_epoch": None},
    ],
    ids=str,
)
def test_steps_and_validations_are_those_of_the_trainer(settings, tmp_path):
    options = {"max_epochs": None, "num_sanity_val_steps": 0, **settings}
    trainer = make_trainer(tmp_path, count := Count(), **options)
    trainer.fit(TinyModule(TinyNet(2), optim.Adam), TinyData())
    run = examined_run(tiny_config(**{"max_steps": -1, **settings}), *TRUST)
    assert run.num_steps == trainer.global_step
    assert run.count_rounds(run.validation_interval) == count.num_validations


def test_ranks_share_an_epoch_and_ask_for_cores():
    options = ["--trainer.strategy=ddp", "--trainer.devices=64", "--data.init_args.batch_size=5"]
    run = examined_run(digits(), *options)
    assert (run.ranks, run.steps_per_epoch) == (64, 1437 // 64 // 5)
    (finding,) = checks.check_ranks(run)
    require(finding, Level.WARNING, "64 processes")


@pytest.mark.parametrize(("num", "drop_last"), [(10, False), (15, True)])
def test_ranks_share_the_images_of_any_loader_as_the_trainer_does(num, drop_last, monkeypatch):
    def loader(data, sampler=None):
        return DataLoader(data.data, 4, sampler=sampler, drop_last=drop_last)

    monkeypatch.setattr(TinyData, "train_dataloader", loader)
    options = ["--trainer.strategy=ddp", "--trainer.devices=2", f"--data.init_args.num={num}"]
    run = examined_run(tiny_config(), *TRUST, *options)
    sampler = DistributedSampler(range(num), num_replicas=2, rank=0)  # which the Trainer adds
    assert run.steps_per_epoch == len(loader(TinyData(num=num), sampler))


@pytest.mark.parametrize(
    ("load", "threads", "found"), [(0.3, 4, 0), (1.2, 4, 1), (3.1, 2, 1), (2.9, 2, 0), (9.0, 1, 0)]
)
def test_threads_need_cores_that_no_other_process_uses(run, load, threads, found, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(checks, "usable_cores", lambda: 4)
    results = list(checks.check_threads(run))
    assert [result.level for result in results] == [Level.NOTE] * found
    assert all(f"{load} on 4 cores" in result.text for result in results)


# Single checks


def limits(max_steps, max_epochs):
    return {"trainer.fit_loop": SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs)}


def schedule(scheduler, *arguments):
    optimizer = optim.Adam([torch.zeros((), requires_grad=True)])
    config = SimpleNamespace(scheduler=scheduler(optimizer, *arguments), interval="step")
    return {"trainer": SimpleNamespace(lr_scheduler_configs=[config])}


def sampled(process, times=None):
    return {"module.process": process, "module.solver": DDIM(4, times=times)}


def guided(dropout, scale=None):
    guidance = None if scale is None else ClassifierFree(scale)
    return {"module.label_dropout": dropout, "module.guidance": guidance}


def averaged(decay, warmup, num_steps):
    return {"callbacks": [EMA((decay,), warmup)], "num_steps": num_steps}


OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM


@pytest.mark.parametrize(
    ("check", "changes", "level", "text"),
    [
        ("length", limits(-1, 3) | {"num_steps": 66}, OK, "66 optimizer steps"),
        ("length", limits(-1, -1) | {"num_steps": None}, WARNING, "never stops"),
        ("length", limits(0, 3) | {"num_steps": 0}, PROBLEM, "no step"),
        ("length", limits(9, 3) | {"num_steps": None}, NOTE, "unknown"),
        ("intervals", {"callbacks": [SampleGrid(4, every_n_steps=2000)]}, OK, "4 times, every 500"),
        ("intervals", {"callbacks": [SampleGrid(4, every_n_steps=2001)]}, WARNING, "2,001 steps"),
        ("intervals", {"callbacks": [PowerEMA(snapshot_every_n_steps=2001)]}, WARNING, "2,001"),
        ("intervals", {"callbacks": [ModelCheckpoint(every_n_train_steps=5000)]}, WARNING, "5,000"),
        ("intervals", {"validation_interval": 2001}, WARNING, "val_check_interval"),
        ("intervals", {"start_step": 1600, "validation_interval": 750}, WARNING, "400 remaining"),
        ("lr", schedule(WarmupConstant, 401), WARNING, "1 to 10% is usual"),
        ("lr", schedule(WarmupConstant, 2000), PROBLEM, "shorten"),
        ("ema", averaged(0.99, True, 2000), OK, "69 steps, 3.4%"),
        ("ema", averaged(0.9999, False, 68_000), WARNING, "10.2%"),
        ("ema", averaged(0.9999, False, 70_000), OK, "9.9%"),
        ("ema", averaged(0.0, False, 2000), OK, "0 steps"),
        ("terminal_snr", sampled(DiscreteVP(LinearBetas(1000))), OK, "noisiest time"),
        ("terminal_snr", sampled(EDMProcess(), LogSNR()), OK, "sigma 80"),
        ("terminal_snr", sampled(ContinuousVP(beta_d=9.0), LogSNR()), WARNING, "image remain"),
        ("terminal_snr", sampled(DiscreteVP(CosineBetas(1000)), LogSNR(noisiest=-7.0)), OK, ""),
        ("terminal_snr", sampled(DiscreteVP(CosineBetas(9)), LogSNR(noisiest=-4.0)), WARNING, "of"),
        ("label_dropout", guided(0.1), OK, "0.1"),
        ("label_dropout", guided(0.0), NOTE, "cannot be guided"),
        ("label_dropout", guided(0.6), WARNING, "unusual"),
        ("label_dropout", guided(0.0, 2.0), PROBLEM, "never trains"),
        ("label_dropout", guided(0.01, 2.0), WARNING, "unusual"),
    ],
)
def test_a_check(run, check, changes, level, text):
    for path, value in changes.items():
        *parent, name = path.split(".")
        owner = getattr(run, parent[0]) if parent else run
        setattr(owner, name, value)
    finding = max(getattr(checks, f"check_{check}")(run), key=lambda finding: finding.level)
    require(finding, level, text)


@pytest.mark.parametrize("warmup", [True, False])
def test_what_is_advised_instead_of_a_long_average_is_short_enough(run, warmup):
    run.callbacks, run.num_steps = [EMA(0.99999, warmup=False)], 10_000
    (finding,) = checks.check_ema(run)
    decay = float(finding.text.rstrip(".").split()[-1])
    run.callbacks = [EMA(0.99999 if warmup else decay, warmup)]
    assert [finding.level for finding in checks.check_ema(run)] == [OK]


def test_time_adds_up_training_validation_and_sampling(run):
    run.step_seconds, run.sample_seconds, run.num_val_batches = 1.0, 2.0, 600
    run.evaluations = [FIDEvaluation(360, "digits-cnn", every_n_steps=500, repeats_at_end=1)]
    run.grids = [SampleGrid(4, every_n_steps=1000)]
    for ranks, limit in ((1, 1.0), (4, 1.0), (4, 600)):
        run.ranks, run.trainer.limit_val_batches = ranks, limit
        sampling = 2.0 * (5 * 360 / ranks + 2 * 4)
        validation = 4 * 600 / (ranks if limit == 1.0 else 1) / 3  # an int limits each rank
        total = 2000 + sampling + validation
        (time,) = checks.check_time(run)
        assert f"{validation / total:.0%} of it for validation" in time.text
        assert f"{sampling / total:.0%} for FIDs and sample grids" in time.text
        assert time.level is (Level.WARNING if ranks == 1 else Level.NOTE)


def gigabytes(run, *callbacks):
    """Size of a checkpoint, and space that the run still needs."""
    run.callbacks = list(callbacks)
    (finding,) = checks.check_disk(run)
    return [float(part.split()[-1]) for part in finding.text.split(" GB")[:2]]


@pytest.mark.parametrize(("free", "level"), [(2 * 10**6, Level.OK), (10**6, Level.PROBLEM)])
def test_checkpoints_must_fit_on_the_disk(run, free, level, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (finding,) = checks.check_disk(run)
    assert finding.level is level
    run.callbacks = [ModelCheckpoint(save_top_k=-1)]
    (finding,) = checks.check_disk(run)
    require(finding, Level.WARNING, "save_top_k")


@pytest.mark.parametrize(
    ("callback", "num"),
    [
        (ModelCheckpoint(save_top_k=5, monitor="loss"), 7),  # and last.ckpt and its successor
        (ModelCheckpoint(save_top_k=1, monitor="loss", save_last=True), 4),
        (ModelCheckpoint(save_top_k=-1, every_n_train_steps=700), 4),
        (FIDEvaluation(360, "digits-cnn"), 3),
    ],
)
def test_checkpoints_are_counted_and_those_that_are_there_replaced(run, callback, num):
    checkpoint, needed = gigabytes(run, callback)
    assert needed == pytest.approx(num * checkpoint, rel=0.01)
    folder = Path("runs/run/checkpoints")
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(int(checkpoint * 1e9)))
    assert gigabytes(run, callback)[1] == pytest.approx((num - 1) * checkpoint, rel=0.01)


def test_the_first_step_which_may_compile_the_network_is_not_timed(monkeypatch):
    clock = iter([0.0, 90.0, 91.0, 92.0, 95.5])
    monkeypatch.setattr(doctor_run, "synchronized_time", lambda: next(clock))
    watch, trainer = Stopwatch(5.0, makes_steps=True), SimpleNamespace(global_step=0)
    watch.on_train_start(trainer, None)
    for trainer.global_step in (1, 2, 3):
        watch.on_train_batch_end(trainer, None)
    with pytest.raises(doctor_run.FitMeasured):
        watch.on_train_batch_end(trainer, None)
    assert watch.times == [(0, 0.0), (1, 90.0), (2, 91.0), (3, 92.0)]
