"""Every shipped config starts, alone and with every arm, and is what its comments promise."""

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from support.cifar10_files import published_as, write
from support.commands import call
from support.pictures import class_folders, save

from lit_diffusion.cli import main
from lit_diffusion.commands.sweep import parser, plan
from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.metrics.protocols import InceptionV3Compat
from lit_diffusion.networks.unet import UNet

CONFIGS = Path(__file__).parent.parent / "configs"
FOLDERS = {
    "digits": ["digits-ablation"],
    "cifar10": ["cifar10-improved"],
    "imagenet128": ["imagenet128-guided", "imagenet128-guided-small"],
}
"""Folder of arms -> experiments that they are for; arms outside of folders are for all."""
ANY = sorted(CONFIGS.glob("arms/*.yaml"))
NAMED = [CONFIGS / "arms" / f"{arm}.yaml" for arm in ("md", "mdlrc", "lr-decay", "min-snr", "p2")]
PAIRS = [
    (experiments[0], arm)
    for folder, experiments in FOLDERS.items()
    for arm in [
        *(NAMED if folder == "imagenet128" else ANY),  # the large ones, in which all take long
        *sorted(CONFIGS.glob(f"arms/{folder}/*.yaml")),
    ]
]
REPRODUCTIONS = [name for name in chain(*FOLDERS.values()) if name != "digits-ablation"]
PARAMETERS = {
    "cifar10-improved": 52_546_438,
    "imagenet128-guided": 421_529_606,
    "imagenet128-guided-small": 95_513_222,
}
SMALL = [
    "--trainer.fast_dev_run=2",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--data.init_args.batch_size=2",
]
NARROW = "--model.init_args.network.init_args.model_channels=32"
EMPTY = "--trainer.callbacks=[]"


def fit(name, *options):
    return main(["fit", "--config", str(CONFIGS / name), *SMALL, *options])


def settings(path):
    return yaml.safe_load((CONFIGS / path).read_text())


def callback(path):
    """The arguments of the one callback that an arm appends."""
    (added,) = settings(path)["trainer"]["callbacks+"]
    return added["init_args"]


def test_every_config_is_started_by_a_test():
    assert {f.stem for f in CONFIGS.glob("*.yaml")} == {
        "digits",
        "patches",
        "folder",
        *chain(*FOLDERS.values()),
    }
    assert {f.name for f in CONFIGS.glob("arms/*") if f.is_dir()} == FOLDERS.keys()


def test_digits_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert fit("digits.yaml") == 0


def test_patches_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert fit("patches.yaml", NARROW, "--data.init_args.num_val=4") == 0


def test_a_folder_of_pictures_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for i in range(8):
        save(tmp_path / "pictures" / f"{i}.jpg", seed=i, size=(80, 70))
    options = [EMPTY, NARROW, "--data.init_args.train=pictures", "--data.init_args.val=3"]
    assert fit("folder.yaml", *options) == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_configs_say_how_they_are_used(path):
    text, own = path.read_text(), path.relative_to(CONFIGS.parent)
    comment = " ".join(text.partition("\n\n")[0].replace("\\\n#", " ").split())
    assert f"--config {own}" in comment
    if "arms" in path.parts:
        assert "Source" in comment
    else:
        assert f"lit-diffusion fit --config {own}" in comment
        assert yaml.safe_load(text)["seed_everything"] == 0
    named = re.findall(r"configs/[\w./-]*\w\.yaml", text)
    assert [name for name in named if not (CONFIGS.parent / name).is_file()] == []


# What the reproductions and the arms promise


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_networks_have_the_number_of_parameters_that_is_stated(name):
    arguments = settings(f"{name}.yaml")["model"]["init_args"]["network"]["init_args"]
    with torch.device("meta"):
        network = UNet(**arguments)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == PARAMETERS[name]
    assert f"{count:,} parameters" in (CONFIGS / f"{name}.yaml").read_text()


def test_the_control_of_mdlrc_has_its_lr_and_the_betas_it_starts_from():
    mdlrc, control = settings("arms/mdlrc.yaml"), settings("arms/lr-decay.yaml")
    betas = mdlrc["model"]["init_args"]["optimizer"]["init_args"]["betas"]
    assert control["model"] == mdlrc["model"] == settings("arms/beta1-0.8.yaml")["model"]
    floor = callback("arms/mdlrc.yaml")["min_beta1"]
    assert callback("arms/lr-decay.yaml") == {"beta0": betas[0], "min_beta1": floor}


@pytest.mark.parametrize("name", ["digits", "patches", "folder"])
def test_the_decay_of_the_average_can_be_set_on_the_command_line(name, capsys):
    """An option for callbacks is for the last of them."""
    path = CONFIGS / f"{name}.yaml"
    assert call(f"fit --config {path} --trainer.callbacks.decays=[0.5] --print_config") == 0
    *_, last = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert last["class_path"] == "lit_diffusion.callbacks.EMA"
    assert last["init_args"]["decays"] == [0.5]


def test_without_ema_the_callbacks_are_otherwise_those_of_the_experiment():
    callbacks = settings("digits-ablation.yaml")["trainer"]["callbacks"]
    without = settings("arms/digits/no-ema.yaml")["trainer"]["callbacks"]
    assert without[0]["init_args"].pop("decays") == [0.0]
    assert callbacks[0]["init_args"].pop("decays") == [0.99]
    assert without == callbacks


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_controls_of_clts_have_its_density(folder):
    arms = ("clts", "clts-weight", "clts-importance")
    curriculum, *controls = (callback(f"arms/{folder}/{arm}.yaml") for arm in arms)
    assert controls == [curriculum, curriculum]


@pytest.mark.parametrize(
    ("folder", "steps", "bins"),
    [("digits", 150, 1000), ("cifar10", 50_000, 4000), ("imagenet128", 300_000, 1000)],
)
def test_clts_is_that_of_the_paper(folder, steps, bins):
    expected = {"num_steps": steps, "mean": 0.3, "std": 1.0, "num_bins": bins}
    assert callback(f"arms/{folder}/clts.yaml") == expected
    for experiment in FOLDERS[folder]:
        process = settings(f"{experiment}.yaml")["model"]["init_args"]["process"]["init_args"]
        assert process["betas"]["init_args"]["num_steps"] == bins


# Parsing, instantiating and starting


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Synthetic files of CIFAR-10 and of two classes of ImageNet, and no Inception weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CIFAR10, "source", published_as(write(tmp_path / "data")))
    for split in ("train", "val"):
        root = tmp_path / "data" / "imagenet" / split
        class_folders(root, ["n00000001", "n00000002"], each=2, size=(150, 140))
    monkeypatch.setattr(InceptionV3Compat, "check", lambda self: None)


def start(experiment, *arms, width=None):
    """Exit code of one step of training and validation; `width` is that of the network."""
    options = [f"--config={arm}" for arm in arms]
    if width is not None:
        options.append(f"--model.init_args.network.init_args.model_channels={width}")
    if "imagenet" in experiment:
        keys = ("model.init_args", "model.init_args.network.init_args")
        options += [f"--{key}.num_classes=2" for key in keys]
        options += ["--data.init_args.cache_dir=cache", "--data.init_args.num_workers=0"]
    one = ["--trainer.fast_dev_run=1", "--trainer.devices=1", "--trainer.strategy=auto"]
    return fit(f"{experiment}.yaml", "--data.init_args.batch_size=1", *one, *options)


def quarter(experiment):
    network = settings(f"{experiment}.yaml")["model"]["init_args"]["network"]["init_args"]
    return None if experiment == "digits-ablation" else network["model_channels"] // 4


@pytest.mark.parametrize(
    "experiment",
    ["digits-ablation", "cifar10-improved", "imagenet128-guided-small"],
)
def test_experiments_start_with_the_methods_of_the_paper(offline, experiment):
    """At a quarter of the width, which is the digits' own."""
    folder = next(folder for folder, experiments in FOLDERS.items() if experiment in experiments)
    both = (CONFIGS / "arms" / "mdlrc.yaml", CONFIGS / "arms" / folder / "clts.yaml")
    assert start(experiment, *both, width=quarter(experiment)) == 0


def test_arms_can_be_swept(monkeypatch, tmp_path):
    """One of each kind; `test_every_arm_starts_on_its_experiments` has them all."""
    monkeypatch.chdir(tmp_path)
    kinds = ["md", "lr-decay", "beta1-0.5", "min-snr", "p2", "antithetic"]
    kinds += [f"digits/{name}" for name in ("clts-importance", "fdm", "loss-resampler", "lr-x3")]
    arms = [str(CONFIGS / "arms" / f"{kind}.yaml") for kind in kinds]
    crossed = "+".join(arms[-2:])
    config = str(CONFIGS / "digits-ablation.yaml")
    runs = plan(parser().parse_args([config, "--seeds", "0,1", "--arms", *arms, crossed]), [])
    assert [run.max_steps for run in runs] == [1500] * 2 * (1 + len(arms) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "arm"), PAIRS, ids=lambda value: getattr(value, "stem", value)
)
def test_every_arm_starts_on_its_experiments(offline, experiment, arm):
    assert start(experiment, arm, width=quarter(experiment)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("experiment", REPRODUCTIONS)
def test_reproductions_start_at_their_full_width(offline, experiment):
    assert start(experiment) == 0
