"""Each check, on a run that it must object to and on one that it must not."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from support.commands import call
from support.small_digits import small_digits
from support.tiny_run import HERE, TinyData, TinyModule, TinyNet, tiny_config
from torch import optim
from torch.optim.lr_scheduler import CosineAnnealingLR

from lit_diffusion.callbacks import EMA, FIDEvaluation, PowerEMA, SampleGrid, TimestepCurriculum
from lit_diffusion.cli.doctor import checks
from lit_diffusion.cli.doctor import run as doctor_run
from lit_diffusion.cli.doctor.checks import Level, examine
from lit_diffusion.cli.doctor.run import Stopwatch
from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.grids import LogSNR
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.lr_schedules import WarmupConstant, WarmupCosine
from lit_diffusion.processes import ContinuousVP, CosineBetas, DiscreteVP, EDMProcess, LinearBetas
from lit_diffusion.solvers import DDIM

TRUST = ["--trust", HERE.split(".")[0]]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Stand in an empty folder, without weights in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("torch.hub._hub_dir", None, raising=False)


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


def spec(class_path, **arguments):
    return {"class_path": class_path, "init_args": arguments}


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
    changed.settings = dict(changed.settings)
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--trainer.max_stepz=3"], "Did you mean 'trainer.max_steps'?"),
        (["--ckpt_path=x.ckpt"], "x.ckpt"),
        (["--trainer.precision=64-false"], "precision"),
    ],
)
def test_a_config_that_cannot_be_built_is_the_only_problem(options, text):
    by_topic = findings(tiny_config(), *TRUST, *options)
    assert topics(by_topic) == by_topic.keys() == {"config"}
    assert text in by_topic["config"].text


def test_a_trainer_that_is_refused_leaves_the_other_checks():
    options = ["--trainer.accelerator=gpu", "--trainer.devices=[0,1]"]
    by_topic = findings(tiny_config(max_steps=50), *TRUST, *options)
    assert topics(by_topic) == {"trainer"}
    require(by_topic["length"], Level.OK, "50 optimizer steps of 8 images")


def test_tasks_that_lightning_refuses_are_a_problem(monkeypatch):
    for name, value in {"JOB_ID": "7", "JOB_NAME": "x", "NTASKS": "4", "NNODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    by_topic = findings(tiny_config(), *TRUST)
    assert "--ntasks-per-node" in by_topic["trainer"].text
    assert by_topic["ranks"].level is Level.PROBLEM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            digits(callbacks=[spec("lit_diffusion.callbacks.MomentumDecay", min_beta1=0.95)]),
            "min_beta1=0.95 and beta0=0.9",
        ),
        (digits(callbacks=[fid(weights="ema_2")]), "the callbacks provide"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_fit_refuses_at_its_start_is_a_problem_with_its_message(config, text, capsys):
    by_topic = findings(config)
    assert topics(by_topic) == {"fit"}
    assert text in by_topic["fit"].text
    assert call("fit --config run.yaml") == 2
    assert " ".join(by_topic["fit"].text.split()) in " ".join(capsys.readouterr().err.split())


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
    config = digits()
    config["data"] = spec("lit_diffusion.data.cifar10.CIFAR10")
    by_topic = findings(config)
    require(by_topic["data"], Level.WARNING, f"{CIFAR10.source.filename} will be downloaded")
    assert {"length", "disk", "time", "EMA", "terminal SNR"} <= by_topic.keys()
    assert not Path("data").exists()


def test_prepare_data_of_another_package_is_not_called():
    config = tiny_config(max_steps=50)
    config["data"] = {"class_path": f"{HERE}.PreparedData"}
    by_topic = findings(config, *TRUST)
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
    require(by_topic["fit"], Level.PROBLEM, "of another architecture")
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
        {
            "max_steps": 9,
            "max_epochs": -1,
            "val_check_interval": 6,
            "check_val_every_n_epoch": None,
            "accumulate_grad_batches": 3,
        },
    ],
    ids=str,
)
def test_steps_and_validations_are_those_of_the_trainer(settings, tmp_path):
    count = Count()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    trainer = Trainer(**settings, **quiet, callbacks=[count], default_root_dir=tmp_path)
    trainer.fit(TinyModule(TinyNet(2), optim.Adam), TinyData())
    run = examined_run(tiny_config(**{"max_steps": -1, **settings}), *TRUST)
    assert run.num_steps == trainer.global_step
    assert run.count_rounds(None) == count.num_validations


def test_ranks_share_an_epoch_and_ask_for_cores():
    options = ["--trainer.strategy=ddp", "--trainer.devices=64", "--data.init_args.batch_size=5"]
    run = examined_run(tiny_config(), *TRUST, *options, "--data.init_args.num=1437")
    assert (run.ranks, run.steps_per_epoch) == (64, 1437 // 64 // 5)
    (finding,) = checks.check_devices(run)
    require(finding, Level.WARNING, "64 processes")


def test_rounds_before_a_resume_do_not_count(run):
    run.start_step = 1500
    assert run.count_rounds(None) == run.count_rounds(500) == 1
    assert run.count_rounds(750) == 0
    run.num_steps = None
    assert run.count_rounds(500) == 0


# Single checks


@pytest.mark.parametrize(("setting", "level"), [("auto", Level.NOTE), ("cpu", None)])
def test_a_gpu_that_is_not_found_is_noted(run, setting, level):
    run.settings["accelerator"] = setting
    assert [finding.level for finding in checks.check_devices(run)] == [level] * bool(level)


@pytest.mark.parametrize(
    ("settings", "num_steps", "level", "text"),
    [
        ({"max_steps": -1, "max_epochs": 3}, 66, Level.OK, "66 optimizer steps"),
        ({"max_steps": -1, "max_epochs": -1}, None, Level.WARNING, "never stops"),
        ({"max_steps": -1, "max_epochs": 1000}, 22_000, Level.WARNING, "22,000 optimizer steps"),
        ({"max_steps": 0, "max_epochs": 3}, 0, Level.PROBLEM, "no step"),
        ({"max_steps": 9, "max_epochs": 3}, None, Level.NOTE, "unknown"),
    ],
)
def test_length(run, settings, num_steps, level, text):
    run.trainer.fit_loop = SimpleNamespace(**settings)
    run.settings["max_epochs"] = None if settings["max_epochs"] == 1000 else settings["max_epochs"]
    run.num_steps = num_steps
    (finding,) = checks.check_length(run)
    require(finding, level, text)


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (SampleGrid(4, every_n_steps=2000), None),
        (SampleGrid(4, every_n_steps=2001), "2,001 steps"),
        (PowerEMA(snapshot_every_n_steps=2000), None),
        (PowerEMA(snapshot_every_n_steps=3000), "3,000 steps"),
        (ModelCheckpoint(every_n_train_steps=5000), "5,000 steps"),
        (ModelCheckpoint(every_n_epochs=1), None),
        (TimestepCurriculum(2000), None),
        (TimestepCurriculum(4000), "ends at 2,000"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_intervals_and_curricula_must_fit_the_length(run, callback, text):
    run.callbacks = [callback]
    validation, *others = checks.check_intervals(run)
    require(validation, Level.OK, "4 times, every 500")
    assert [finding.topic for finding in others] == [type(callback).__name__] * bool(text)
    for finding in others:
        require(finding, Level.WARNING, text)


@pytest.mark.parametrize(
    ("interval", "setting", "level"),
    [(2001, 2001, Level.WARNING), (1, 1, Level.WARNING), (22, 1.0, Level.OK)],
)
def test_validation_must_come_as_one_would_think(run, interval, setting, level):
    run.callbacks, run.validation_interval = [], interval
    run.settings["val_check_interval"] = setting
    (finding,) = checks.check_intervals(run)
    assert finding.level is level


@pytest.mark.parametrize(
    ("scheduler", "level", "text"),
    [
        (lambda o: WarmupConstant(o, 50), Level.OK, "50 steps, 2.5%"),
        (lambda o: WarmupConstant(o, 400), Level.OK, "20.0%"),
        (lambda o: WarmupConstant(o, 401), Level.WARNING, "1 to 10% is usual"),
        (lambda o: WarmupConstant(o, 2000), Level.PROBLEM, "shorten"),
        (lambda o: WarmupCosine(o, 2000), Level.OK, "0 steps"),
        (lambda o: WarmupCosine(o, 1500), Level.WARNING, "takes 1,500 steps"),
        (lambda o: CosineAnnealingLR(o, 4000), Level.WARNING, "takes 4,000 steps"),
    ],
)
def test_the_lr_must_fit_the_length(run, scheduler, level, text):
    optimizer = optim.Adam([torch.zeros((), requires_grad=True)])
    config = SimpleNamespace(scheduler=scheduler(optimizer), interval="step")
    run.trainer = SimpleNamespace(lr_scheduler_configs=[config], estimated_stepping_batches=2000)
    (finding,) = checks.check_lr(run)
    require(finding, level, text)


@pytest.mark.parametrize(
    ("decay", "warmup", "steps", "level", "text"),
    [
        (0.99, True, 2000, Level.OK, "69 steps, 3.4%"),
        (0.9999, True, 1000, Level.OK, "77 steps"),
        (0.9999, False, 2000, Level.WARNING, "82% of its final average"),
        (0.9999, False, 68_000, Level.WARNING, "10.2%"),
        (0.9999, False, 70_000, Level.OK, "9.9%"),
        (0.0, False, 2000, Level.OK, "0 steps"),
    ],
)
def test_the_half_life_of_averages_must_fit_the_length(run, decay, warmup, steps, level, text):
    run.num_steps, run.callbacks = steps, [EMA((decay, 0.5), warmup)]
    finding, _ = checks.check_ema(run)
    require(finding, level, text)
    if level is Level.WARNING:
        run.callbacks = [EMA(float(finding.text.rstrip(".").split()[-1]), warmup)]
        (finding,) = checks.check_ema(run)
        assert finding.level is Level.OK


@pytest.mark.parametrize(
    ("process", "times", "level", "text"),
    [
        (DiscreteVP(LinearBetas(1000)), None, Level.OK, "noisiest time"),
        (EDMProcess(), LogSNR(), Level.OK, "sigma 80"),
        (ContinuousVP(beta_d=9.0), LogSNR(), Level.WARNING, "of the image remain"),
        (DiscreteVP(CosineBetas(1000)), LogSNR(noisiest=-7.0), Level.OK, ""),
        (DiscreteVP(CosineBetas(1000)), LogSNR(noisiest=-4.0), Level.WARNING, "should remain"),
    ],
)
def test_samples_must_start_from_what_was_trained(run, process, times, level, text):
    run.module.process, run.module.solver = process, DDIM(4, times=times)
    (finding,) = checks.check_terminal_snr(run)
    require(finding, level, text)


@pytest.mark.parametrize(
    ("dropout", "guidance", "level"),
    [
        (0.1, None, Level.OK),
        (0.0, None, Level.NOTE),
        (0.6, None, Level.WARNING),
        (0.2, ClassifierFree(2.0), Level.OK),
        (0.0, ClassifierFree(2.0), Level.PROBLEM),
        (0.01, ClassifierFree(2.0), Level.WARNING),
        (0.4, ClassifierFree(2.0), Level.WARNING),
        (0.0, ClassifierFree(1.0), Level.NOTE),
    ],
)
def test_guidance_needs_label_dropout(run, dropout, guidance, level):
    run.module.label_dropout, run.module.guidance = dropout, guidance
    (finding,) = checks.check_label_dropout(run)
    require(finding, level, f"label_dropout={dropout:g}")
    run.module.num_classes = None
    assert list(checks.check_label_dropout(run)) == []


def test_time_adds_up_training_validation_and_sampling(run):
    run.step_seconds, run.sample_seconds = 1.0, 2.0
    run.evaluations = [FIDEvaluation(360, "digits-cnn", every_n_steps=500, repeats_at_end=1)]
    run.grids = [SampleGrid(4, every_n_steps=1000)]
    for ranks in (1, 4):
        run.ranks = ranks
        sampling = 2.0 * (5 * 360 / ranks + 2 * 4)
        validation = 4 * 360 / ranks / 64 / 3
        total = 2000 + sampling + validation
        time, *others = checks.check_time(run)
        assert f"{sampling / total:.0%} for FIDs and sample grids" in time.text
        assert len(others) == (ranks == 1)
        assert all("every_n_steps" in finding.text for finding in others)


def test_validation_that_takes_most_of_the_time_is_warned_of(run):
    run.step_seconds, run.sample_seconds, run.validation_interval = 1.0, 0.0, 1
    _, finding = checks.check_time(run)
    require(finding, Level.WARNING, "val_check_interval")
    run.validation_interval = 2
    (time,) = checks.check_time(run)
    assert "48% of it for validation" in time.text
    for limit, share in ((0.5, "32%"), (2, "25%"), (100, "48%"), (1, "14%")):
        run.trainer.limit_val_batches = limit
        assert f"{share} of it for validation" in next(checks.check_time(run)).text
    run.start_step = 2000
    assert list(checks.check_time(run)) == []
    run.start_step, run.step_seconds = 0, float("nan")
    assert list(checks.check_time(run)) == []


@pytest.mark.parametrize(("free", "level"), [(2 * 10**6, Level.OK), (10**6, Level.PROBLEM)])
def test_checkpoints_must_fit_on_the_disk(run, free, level, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (finding,) = checks.check_disk(run)
    require(finding, level, "1 checkpoints")


def test_the_run_folder_must_be_one(run):
    Path("runs").write_text("")
    (finding,) = checks.check_disk(run)
    require(finding, Level.PROBLEM, "runs is no folder that can be written to")


def test_snapshots_count(run):
    def gigabytes(*callbacks):
        run.callbacks = list(callbacks)
        (finding,) = checks.check_disk(run)
        return float(finding.text.split("GB, ")[1].split()[0])

    size = 4e-9 * sum(p.numel() for p in run.module.parameters())
    rare = PowerEMA((0.05, 0.1), snapshot_every_n_steps=100)
    assert gigabytes(rare) == pytest.approx(20 * 2 * size, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "num"),
    [
        ({"save_top_k": 5, "monitor": "loss"}, 5),
        ({"save_top_k": 1, "monitor": "loss", "save_last": True}, 2),
        ({"save_top_k": -1, "every_n_train_steps": 700}, 2),
        ({"save_top_k": -1}, None),
    ],
)
def test_checkpoints_are_counted(run, arguments, num):
    run.callbacks = [ModelCheckpoint(**arguments)]
    (finding,) = checks.check_disk(run)
    if num is None:
        require(finding, Level.WARNING, "save_top_k")
    else:
        require(finding, Level.OK, f"{num} checkpoints")


def test_the_best_by_fid_is_a_checkpoint_and_files_that_are_there_are_replaced(run):
    run.callbacks = [*run.callbacks, FIDEvaluation(360, "digits-cnn")]
    (finding,) = checks.check_disk(run)
    require(finding, Level.OK, "2 checkpoints")
    checkpoint, needed = (float(part.split()[-1]) for part in finding.text.split(" GB")[:2])
    assert needed == pytest.approx(3 * checkpoint, rel=0.01)
    folder = Path("runs/run/checkpoints")
    folder.mkdir(parents=True)
    (folder / "last.ckpt").write_bytes(bytes(int(checkpoint * 1e9)))
    (finding,) = checks.check_disk(run)
    assert float(finding.text.split("GB, ")[1].split()[0]) == pytest.approx(
        2 * checkpoint, rel=0.01
    )


def test_the_step_that_compiles_the_network_is_not_timed(monkeypatch):
    clock = iter([0.0, 90.0, 91.0, 92.0])
    monkeypatch.setattr(doctor_run, "synchronized_time", lambda: next(clock))
    watch, trainer = Stopwatch(5.0, makes_steps=True), SimpleNamespace(global_step=0)
    module = SimpleNamespace(hparams={"compile": "default"})
    watch.on_train_start(trainer, module)
    for trainer.global_step in (1, 2, 3):
        watch.on_train_batch_end(trainer, module)
    assert watch.times == [(1, 90.0), (2, 91.0), (3, 92.0)]
