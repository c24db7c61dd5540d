"""Every shipped config starts, alone and with every arm, and is what its comments promise."""

import re
from importlib import import_module
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support import small_encoder, small_vae
from support.cifar10_files import published_as, write
from support.commands import call
from support.mnist_files import write as write_mnist
from support.pictures import class_folders, save
from support.spawn import run_ranks

from lit_diffusion.cli.main import main
from lit_diffusion.config.trust import short_names
from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.metrics.extractors import InceptionV3Compat
from lit_diffusion.modules.diffusion import DiffusionModule

CONFIGS = Path(__file__).parent.parent / "configs"
FOLDERS = {
    "digits": ["digits-ablation"],
    "digits-textbook": ["digits-ablation"],  # on top of digits/textbook
    "cifar10": ["cifar10-improved"],
    "cifar10-small": ["cifar10-small"],
    "imagenet128": ["imagenet128-guided", "imagenet128-guided-small"],
    "patches-small": ["patches-small"],
    "mnist": ["mnist"],
    "imagenet256-latents": ["imagenet256-latents"],
}
"""Folder of arms -> experiments that they are for; arms outside of folders are for all."""
METHODS = ["digits", "cifar10", "imagenet128"]
"""Folders with all of the paper's methods and their controls."""
METHODS_PAGE = (CONFIGS.parent / "docs" / "published-methods.md").read_text()
METHOD_FILES = sorted(path.stem for path in CONFIGS.glob("methods/*.yaml"))
ANY = sorted(CONFIGS.glob("arms/*.yaml"))
NAMED = [CONFIGS / "arms" / f"{arm}.yaml" for arm in ("md", "mdlrc", "lr-decay", "min-snr", "p2")]
ON_TOP_OF = {"digits/sra": "digits/dit", "digits-textbook": "digits/textbook"}
"""Arms, or folders of arms, that are appended to another arm."""
PAIRS = [
    (experiments[0], arm)
    for folder, experiments in FOLDERS.items()
    if folder not in ("mnist", "cifar10-small", "imagenet256-latents")  # with tests of their own
    for arm in [
        *(ANY if folder in ("digits", "cifar10") else NAMED),  # others take long, or add nothing
        *sorted(CONFIGS.glob(f"arms/{folder}/*.yaml")),
    ]
    if arm.stem not in ("cifar10", "mnist-8x8")  # with tests of their own, too
]
RECIPES = [*(f"digits/{arm}" for arm in ("decayed", "textbook", "fast"))]
RECIPES += sorted(f"mnist/{path.stem}" for path in CONFIGS.glob("arms/mnist/*.yaml"))
NUMBERED = [
    (str(path.relative_to(CONFIGS)), match[1], float(match[2]) * (1000 if match[3] else 1))
    for path in sorted(CONFIGS.rglob("arms/**/*.yaml"))
    if (match := re.fullmatch(r"(?:clts-)?(beta1|lr|mean|std|target)-x?([\d.]+)(k?)", path.stem))
]
"""Arms that are one number: file, what it is of, and the number."""
REPRODUCTIONS = [*FOLDERS["cifar10"], *FOLDERS["imagenet128"]]
PARAMETERS = {
    "cifar10-improved": 52_546_438,
    "imagenet128-guided": 421_529_606,
    "imagenet128-guided-small": 95_513_222,
}
GANS = ["digits-dcgan", "digits-biggan", "mnist-dcgan", "mnist-biggan"]
GANS += ["cifar10-dcgan", "cifar10-biggan"]
GANS += ["imagenet128-dcgan", "imagenet128-biggan"]
LATENTS = {"imagenet256-latents": 256, "imagenet512-latents": 512}
"""Config -> the side of its images."""
LATENT_ARMS = [("imagenet256-latents", arm) for arm in ("repa", "sra")]
SMALL = [
    "--trainer.fast_dev_run=2",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--data.init_args.batch_size=2",
]
NARROW = "--model.init_args.network.init_args.model_channels=32"
EMPTY = "--trainer.callbacks=[]"
FEW = ["--data.init_args.num_val=4", "--trainer.callbacks.SampleGrid.num=4"]
WITHOUT_FILES = {"digits": [], "digits-classifier": [], "digits-described": [], "fast": []}
WITHOUT_FILES |= {"patches-small": [], "patches": [NARROW, *FEW]}


def flat(settings, name=""):
    """Settings by their dotted names; a class has that of its place, a callback its own."""
    if not isinstance(settings, dict):
        yield name, settings
        return
    for key, value in settings.items():
        if key in ("class_path", "init_args"):
            yield from flat(value, name)
        elif key.startswith("callbacks"):
            for callback in value:
                name_of_class = callback["class_path"].rpartition(".")[2]
                yield from flat(callback, f"{name}.{key}.{name_of_class}")
        else:
            yield from flat(value, f"{name}.{key}".lstrip("."))


def fit(name, *options):
    return main(["fit", "--config", str(CONFIGS / name), *SMALL, *options])


def settings(path):
    return yaml.load((CONFIGS / path).read_text(), yaml.CSafeLoader)  # in a tenth of the time


def arms_of_each_kind():
    """(experiment, arm) with the first arm of those that differ in numbers alone."""
    kinds = {}
    for experiment, arm in PAIRS:
        kind = {(name, v if isinstance(v, str) else None) for name, v in flat(settings(arm))}
        kinds.setdefault(frozenset(kind), (experiment, arm))
    return list(kinds.values())


def callback(path):
    """The arguments of the one callback that an arm appends."""
    (added,) = settings(path)["trainer"]["callbacks+"]
    return added["init_args"]


def test_every_config_is_started_by_a_test():
    assert {f.stem for f in CONFIGS.glob("*.yaml")} == {
        *("folder", "folder-small", "cifar10-uvit", "dit-1b", "mnist-long"),
        *WITHOUT_FILES,
        *GANS,
        *LATENTS,
        *chain(*FOLDERS.values()),
    }
    assert {f.name for f in CONFIGS.glob("arms/*") if f.is_dir()} == FOLDERS.keys()


def test_a_network_too_large_for_this_machine_is_planned(capsys):
    """`tests/modules/test_sharding.py` trains a small one so."""
    assert main(["plan", "--config", str(CONFIGS / "dit-1b.yaml"), "--ranks=8,64"]) == 0
    title, _, weights, *_ = capsys.readouterr().out.splitlines()
    assert title == "DiT: 1,009,945,632 weights, 32 images on each rank"
    shares = [float(cell) for cell in weights.split()[2:]]
    assert shares == pytest.approx([4 * 1009945632 / 2**30 / ranks for ranks in (8, 64)], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", GANS)
def test_gans_start(offline, name):
    options = [] if "digits" in name else ["--trainer.devices=1", "--trainer.strategy=auto"]
    if "mnist" in name:
        write_mnist(Path("data"), train=64, val=32)
        options += [EMPTY, "--data.init_args.num_workers=0"]
    if "imagenet" in name:
        options += ["--data.init_args.cache_dir=cache", "--data.init_args.num_workers=0"]
    if name == "cifar10-biggan":
        options += ["--model.init_args.discriminator_steps=1"]  # so that the generator has a step
    if name == "imagenet128-biggan":
        options += ["--model.init_args.num_classes=2"]
        for network in ("generator", "discriminator"):
            inside = f"--model.init_args.{network}.init_args"
            options += [f"{inside}.num_classes=2", f"{inside}.width=8"]
    assert fit(f"{name}.yaml", *options) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_what_needs_no_files_starts(folder, name):
    assert fit(f"{name}.yaml", *WITHOUT_FILES[name]) == 0


@pytest.mark.slow
def test_a_folder_of_pictures_starts(folder):
    for i in range(8):
        save(folder / "pictures" / f"{i}.jpg", seed=i, size=(80, 70))
    options = [EMPTY, NARROW, "--data.init_args.train=pictures", "--data.init_args.val=3"]
    assert fit("folder.yaml", *options) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:4 images cannot fill a covariance")
def test_a_small_folder_runs_as_its_comments_say(folder):
    """The commands of its header; size and classes are those of the pictures, also on a resume."""
    class_folders(folder / "pictures", "abc", each=30, size=(80, 70))
    (folder / "configs").symlink_to(CONFIGS)
    header = (CONFIGS / "folder-small.yaml").read_text().partition("\n# The first")[0]
    lines = header.replace("\\\n#", "").replace("IMAGES", "pictures").splitlines()
    train, fit, sample = (line[4:] for line in lines if line.startswith("#   lit-diffusion"))
    size = "--data.init_args.image_size=32 --data.init_args.num_workers=0"
    few = f"{size} --model.solver.steps=2 --trainer.val_check_interval=2"
    for callback, option in (("FIDEvaluation", "num_samples"), ("SampleGrid", "num")):
        few += f" --trainer.callbacks.{callback}.{option}=4"
    assert call(f"{train.removeprefix('lit-diffusion ')} {size} --steps 2") == 0
    fit = f"{fit.removeprefix('lit-diffusion ')} {few} --trainer.max_steps="
    assert call(f"{fit}2") == 0
    assert call(f"{fit}3 --ckpt_path=last") == 0
    saved = dict(flat(settings(Path("runs/folder-small/config.yaml").absolute())))
    assert saved["model.image_shape"] == [3, 32, 32]
    assert saved["model.num_classes"] == saved["model.network.num_classes"] == 3
    assert call(sample.removeprefix("lit-diffusion ").replace("64", "4")) == 0
    assert len(list(Path("folder-samples").glob("0*.png"))) == 4


def test_shape_and_classes_of_the_data_need_data_and_a_command(folder, capsys):
    assert fit("digits.yaml", "--model.init_args.image_shape=data", "--data=null") == 2
    assert "image_shape" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'data'"):
        DiffusionModule(*[None] * 7, image_shape="data", num_classes=2)


def test_pictures_without_class_folders_need_no_label_dropout(folder, capsys):
    save(folder / "pictures" / "0.png", seed=0)
    assert fit("folder-small.yaml", "--data.init_args.train=pictures") == 2
    assert "pictures has no class folders, and label_dropout=0.1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "arm"),
    [
        *(("mnist", ""), ("mnist-long", ""), ("digits-ablation", "digits/mnist-8x8")),
        *(("mnist", arm) for arm in RECIPES),
    ],
)
def test_mnist_starts_as_its_comments_say(folder, config, arm):
    write_mnist(folder / "data", train=80, val=20)
    options = [f"--config={CONFIGS}/arms/{arm}.yaml"] if arm else []
    extractor = "mnist-cnn-8x8" if arm == "digits/mnist-8x8" else "mnist-cnn"
    out = [f"--out={extractor}.safetensors", "--steps=1"]
    assert main(["train-extractor", f"--config={CONFIGS}/{config}.yaml", *options, *out]) == 0
    assert fit(f"{config}.yaml", *options) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extractor", "configs"),
    [
        ("cifar10-cnn", ["cifar10-small"]),
        ("cifar10-cnn", ["cifar10-small", "cifar10-small/clts"]),
        ("cifar10-cnn-16x16", ["cifar10-small", "cifar10-small/16x16"]),
        (
            "cifar10-cnn-16x16",
            ["cifar10-small", "cifar10-small/16x16", "cifar10-small/clts-target-400"],
        ),
        ("cifar10-cnn", ["patches-small", "patches-small/cifar10"]),
    ],
)
def test_cifar10_in_class_folders_starts_as_its_comments_say(folder, extractor, configs):
    for split in ("train", "test"):
        class_folders(folder / "data" / "cifar10" / split, "abcdefghij", each=2, size=(32, 32))
    experiment, *arms = configs
    options = [f"--config={CONFIGS}/arms/{arm}.yaml" for arm in arms]
    options += ["--data.init_args.num_workers=0", "--data.init_args.batch_size=2"]
    out = [f"--out={extractor}.safetensors", "--steps=1"]
    assert main(["train-extractor", f"--config={CONFIGS}/{experiment}.yaml", *options, *out]) == 0
    assert fit(f"{experiment}.yaml", *options, NARROW) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arm"), [*((name, None) for name in LATENTS), *LATENT_ARMS])
def test_latents_start(offline, tmp_path, name, arm):
    """A narrow network on latents of four images, with a VAE of their shape."""
    pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
    side, data = LATENTS[name], tmp_path / "data"
    small_vae.save(data / "sd-vae", channels=(8, 8, 8, 8))
    for split in ("train", "val"):
        small_vae.write_latents(data / f"{name}" / split, data / "sd-vae", side)
    np.savez(data / f"{name.removesuffix('-latents')}.npz", arr_0=np.zeros((4, 8, 8, 3), np.uint8))
    narrow = {"width": 32, "depth": 2, "num_heads": 2, "num_classes": 2}
    options = [f"--model.init_args.network.init_args.{k}={v}" for k, v in narrow.items()]
    options += ["--model.init_args.num_classes=2", "--model.init_args.solver.init_args.steps=2"]
    options += ["--trainer.devices=1", "--trainer.strategy=auto", "--data.init_args.num_workers=0"]
    options += ["--trainer.callbacks.SampleGrid=null"]
    if arm is not None:
        small_encoder.save(data / "dinov2-base")
        (tmp_path / "ILSVRC2012").symlink_to(data / "imagenet")
        loss = "--model.init_args.auxiliary_loss.init_args"
        teacher = f"{loss}.teacher.init_args"
        options += [f"--config={CONFIGS}/arms/{name}/{arm}.yaml", f"{loss}.width=32"]
        options += [f"{loss}.block=blocks.0", f"{loss}.hidden=[8]"]
        if arm == "sra":
            options += [f"{teacher}.block=blocks.1"]
        else:
            options += [f"{teacher}.width=16", f"{teacher}.image_size=28"]
            data_options = {
                "strict": "false",
                "cache_dir": "cache",
                "num_workers": 0,
                "batch_size": 2,
            }
            options += [f"--data.init_args.{k}={v}" for k, v in data_options.items()]
    assert fit(f"{name}.yaml", *options) == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_comments_name_the_config_itself_its_source_and_files_that_exist(path):
    text, name = path.read_text(), path.relative_to(CONFIGS.parent)
    comment = " ".join(text.partition("\n\n")[0].replace("\\\n#", " ").split())
    if {"arms", "methods", "fragments"} & set(path.parts):
        assert f"--config {name}" in comment
        assert "Source" in comment
    else:
        assert f"lit-diffusion fit --config {name}" in comment
        assert yaml.safe_load(text)["seed_everything"] == 0
    others = re.findall(r"configs/[\w./-]*\w\.yaml", text)
    assert [other for other in others if not (CONFIGS.parent / other).is_file()] == []


@pytest.mark.parametrize("name", [*REPRODUCTIONS, "cifar10-uvit", *LATENTS])
def test_settings_of_a_gpu_go_with_every_config_that_needs_one(capsys, name):
    fragment = dict(flat(settings("fragments/gpu.yaml")))
    plain, fast = (
        dict(flat(parsed(capsys, f"{name}.yaml", *more))) for more in ([], ["fragments/gpu.yaml"])
    )
    assert {key: fast[key] for key in fragment} == fragment
    assert {key for key in plain | fast if plain.get(key) != fast.get(key)} <= fragment.keys()
    assert "fragments/gpu.yaml" in (CONFIGS / f"{name}.yaml").read_text().partition("\n\n")[0]


# What the reproductions and the arms promise


def network_of(name):
    with torch.device("meta"):
        return build(settings(f"{name}.yaml")["model"]["init_args"]["network"])


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("name", [*PARAMETERS, "cifar10-uvit", *LATENTS])
def test_networks_have_the_number_of_parameters_that_is_stated(name):
    network = network_of(name)
    # Papers also count a position embedding that is not trained.
    embeddings = [b for buffer, b in network.named_buffers() if buffer == "pos_embed"]
    number = count([*network.parameters(), *embeddings])
    assert number == PARAMETERS.get(name, number)
    assert f"{number:,} parameters" in (CONFIGS / f"{name}.yaml").read_text()


def test_the_control_of_mdlrc_has_its_lr_and_the_betas_it_starts_from():
    mdlrc, control = settings("arms/mdlrc.yaml"), settings("arms/lr-decay.yaml")
    betas = mdlrc["model"]["init_args"]["optimizer"]["init_args"]["betas"]
    assert control["model"] == mdlrc["model"] == settings("arms/beta1-0.8.yaml")["model"]
    floor = callback("arms/mdlrc.yaml")["min_beta1"]
    assert callback("arms/lr-decay.yaml") == {"beta0": betas[0], "min_beta1": floor}


def parsed(capsys, *names):
    """All settings of a fit, but for its folder, which is named after the config."""
    configs = " ".join(f"--config {CONFIGS / name}" for name in names)
    assert call(f"fit {configs} --print_config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    printed["trainer"].pop("default_root_dir")
    return printed


def import_class(name):
    """A class by its path or short name."""
    module, _, name = short_names().get(name, name).rpartition(".")
    return getattr(import_module(module), name)


def build(spec):
    """The object of a config's class path and arguments."""
    if not isinstance(spec, dict):
        return spec
    arguments = {key: build(value) for key, value in spec.get("init_args", {}).items()}
    return import_class(spec["class_path"])(**arguments)


@pytest.mark.parametrize(
    "base",
    ["digits", pytest.param("cifar10-improved", marks=pytest.mark.slow)],  # its solver is DDPM too
)
@pytest.mark.parametrize("method", METHOD_FILES)
def test_a_method_is_its_column_of_the_page(capsys, method, base):
    rows = [line.split(" | ") for line in METHODS_PAGE.splitlines() if line.startswith("| ")]
    start = next(i for i, row in enumerate(rows) if f"configs/methods/{method}.yaml" in str(row))
    column = next(i for i, cell in enumerate(rows[start]) if f"/{method}.yaml" in cell)
    model = parsed(capsys, f"{base}.yaml", f"methods/{method}.yaml")["model"]["init_args"]
    for row in rows[start + 1 : start + 6]:
        argument, text = (row[i].strip("|` ") for i in (0, column))
        names = {name: import_class(name) for name in re.findall(r"\w+(?=\()", text)}
        assert repr(build(model[argument])) == repr(eval(text, names))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHOD_FILES)
def test_methods_start(folder, method):
    variance = ["--model.network.out_channels=2"] * (method == "improved-diffusion")
    config = f"--config={CONFIGS}/methods/{method}.yaml"
    assert fit("digits.yaml", config, EMPTY, "--model.solver.steps=4", *variance) == 0


def test_the_fast_recipe_is_the_baseline_with_its_arm(capsys):
    both = "digits-ablation.yaml", "arms/digits/fast.yaml"
    assert parsed(capsys, "fast.yaml") == parsed(capsys, *both)


@pytest.mark.parametrize(
    ("before", "arm"),
    [("arms/digits/balanced", "edm"), ("arms/digits/balanced", "edm-fdm"), ("methods/jit", "flow")],
)
def test_the_noise_levels_of_an_arm_are_its_own_where_an_earlier_config_has_others(
    capsys, before, arm
):
    """A later config that names the same class keeps the arguments that it does not repeat."""
    configs = ["digits-ablation.yaml", f"{before}.yaml", f"arms/digits/{arm}.yaml"]
    alone, both = (
        parsed(capsys, *each)["model"]["init_args"]["times"] for each in (configs[::2], configs)
    )
    assert both == alone


@pytest.mark.parametrize("folder", METHODS)
def test_the_arms_of_clts_share_its_density_with_a_bin_for_each_time(folder):
    arms = ("clts", "clts-weight", "clts-importance")
    clts, *controls = (callback(f"arms/{folder}/{arm}.yaml") for arm in arms)
    assert controls == [clts, clts]
    for experiment in FOLDERS[folder]:
        numbers = dict(flat(settings(f"{experiment}.yaml")))
        assert numbers["model.process.betas.num_steps"] == clts["num_bins"]


@pytest.mark.parametrize(("path", "what", "number"), NUMBERED, ids=str)
def test_arms_with_a_number_in_their_name_set_that_number_alone(path, what, number):
    arm = dict(flat(settings(path)))
    if what == "beta1":
        assert arm == {"model.optimizer.betas": [number, 0.999]}
    elif what == "lr":
        (experiment, *_) = FOLDERS[Path(path).parent.name]
        lr = dict(flat(settings(f"{experiment}.yaml")))["model.optimizer.lr"]
        assert arm == {"model.optimizer.lr": pytest.approx(number * lr)}
    else:
        name = {"target": "num_steps"}.get(what, what)
        clts = dict(flat(settings(Path(path).with_name("clts.yaml"))))
        assert arm == clts | {f"trainer.callbacks+.TimestepCurriculum.{name}": number}


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


def start(experiment, *arms):
    """Exit code of a step of training and validation, at a quarter of a wide network's width."""
    width = dict(flat(settings(f"{experiment}.yaml")))["model.network.model_channels"]
    width = width // 4 if width > 32 else None
    one = ["--trainer.devices=1", "--trainer.strategy=auto"]
    return fit(f"{experiment}.yaml", *short(experiment, *arms, width=width), *one)


def short(experiment, *arms, width):
    options = [f"--config={arm}" for arm in arms]
    if width is not None:
        options += [f"--model.init_args.network.init_args.model_channels={width}"]
    if "imagenet" in experiment:
        keys = ("model.init_args", "model.init_args.network.init_args")
        options += [f"--{key}.num_classes=2" for key in keys]
        options += ["--data.init_args.cache_dir=cache", "--data.init_args.num_workers=0"]
    images = 2 if any("contrastive" in str(arm) for arm in arms) else 1  # it needs another image
    return [*options, f"--data.init_args.batch_size={images}", "--trainer.fast_dev_run=1"]


@pytest.mark.quick("digits-ablation")
@pytest.mark.parametrize("experiment", ["digits-ablation", *REPRODUCTIONS])
def test_experiments_start_with_the_methods_of_the_paper(offline, experiment):
    folder = next(folder for folder, experiments in FOLDERS.items() if experiment in experiments)
    both = (CONFIGS / "arms" / "mdlrc.yaml", CONFIGS / "arms" / folder / "clts.yaml")
    assert start(experiment, *both) == 0


@pytest.mark.slow
def test_the_uvit_of_cifar10_starts_narrow(offline):
    narrow = {"width": 32, "depth": 2, "num_heads": 2}
    options = [f"--model.init_args.network.init_args.{k}={v}" for k, v in narrow.items()]
    options += ["--model.init_args.solver.init_args.steps=2"]
    assert fit("cifar10-uvit.yaml", *options, "--trainer.fast_dev_run=1") == 0


OF_EACH_KIND, RARE = arms_of_each_kind(), pytest.mark.rare


@pytest.mark.parametrize(
    ("experiment", "arm"),
    [pytest.param(*p, marks=pytest.mark.slow if p in OF_EACH_KIND else RARE) for p in PAIRS],
    ids=lambda value: Path(value).stem,
)
def test_every_arm_starts_on_its_experiments(offline, caplog, experiment, arm):
    """The slow ones are an arm of each kind; the rare ones differ from those in numbers.

    An arm that names another class repeats the arguments of the experiment's that should stay.
    """
    name = str(arm.relative_to(CONFIGS / "arms").with_suffix(""))
    below = [ON_TOP_OF[each] for each in (name, arm.parent.name) if each in ON_TOP_OF]
    assert start(experiment, *(CONFIGS / "arms" / f"{each}.yaml" for each in below), arm) == 0
    assert not [message for message in caplog.messages if " replaces " in message]


def fit_without_inception(*options):
    InceptionV3Compat.check = lambda self: None  # its weights are not there
    raise SystemExit(main(["fit", *options]))


@pytest.mark.slow
@pytest.mark.system
def test_the_config_for_eight_gpus_starts_on_two_ranks_in_half_precision(offline, tmp_path):
    """With its own strategy, in the half precision that CPUs have, of images of 32x32.

    Two steps: in the second, DDP refuses a parameter that had no gradient in the first.
    """
    name = "imagenet128-guided"
    options = ["--config", str(CONFIGS / f"{name}.yaml"), *SMALL, *short(name, width=32)]
    options += ["--model.image_shape=[3,32,32]", "--data.init_args.image_size=32"]
    options += ["--trainer.fast_dev_run=2", "--trainer.precision=bf16-mixed", "--trainer.devices=2"]
    ranks = run_ranks(fit_without_inception, 2, *options, timeout=300)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks
    for number, rank in enumerate(ranks, start=1):
        assert f"MEMBER: {number}/2" in rank.output
    assert "bfloat16 Automatic Mixed Precision" in ranks[0].output
