"""`init`: the config that it writes starts at once, and its comments and README are true."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.commands import call
from support.pictures import class_folders, save

from lit_diffusion.cli import init
from lit_diffusion.cli.init import build_config, method_names
from lit_diffusion.cli.main import main
from lit_diffusion.config.shipped import shipped_configs
from lit_diffusion.data import image_folder

FEW = "--model.solver.steps=2 --data.num_workers=0 --trainer.val_check_interval=2"
FEW += " --trainer.callbacks.SampleGrid.num=4 --trainer.callbacks.SampleGrid.every_n_steps=2"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def commands(readme: Path) -> list[str]:
    """The commands in a README, without the name of the program."""
    return re.findall(r"^    lit-diffusion (.*)$", readme.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["velocity", pytest.param("improved-diffusion", marks=pytest.mark.rare)]
)
def test_a_folder_with_classes_trains_as_its_readme_says(method, capsys):
    """In a folder whose name has a blank, with images of several sizes and modes."""
    class_folders(Path("my photos"), "abc", each=4, size=(80, 70))
    save(Path("my photos/a/gray.png"), mode="L", size=(20, 20))
    assert call(f"init 'my flowers' --images 'my photos' --size 16 --method {method}") == 0
    assert "13 images with 3 classes" in capsys.readouterr().out
    fit, resume, longer, sample, extractor, _ = commands(Path("my flowers/README.md"))
    assert call(f"{fit} {FEW} --trainer.max_steps=2") == 0
    assert call(f"{resume} {FEW} --trainer.max_steps=3") == 0
    assert call(f"{longer.replace('40000', '4')} {FEW}") == 0
    assert call(f"{sample.replace('64', '3')} --labels 0 --guidance 2 --steps 2") == 0
    assert len(list(Path("my flowers/samples").glob("0*.png"))) == 3
    assert list(Path("my flowers/run/samples").glob("step-*.png"))
    saved = yaml.safe_load(Path("my flowers/run/config.yaml").read_text())
    arguments = saved["model"]["init_args"]
    assert (arguments["image_shape"], arguments["num_classes"]) == ([3, 16, 16], 3)
    assert shlex.split(extractor)[-1] == "my flowers/fid-network.safetensors"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:4 images cannot fill a covariance")
def test_a_folder_without_classes_trains_from_anywhere_and_scores_with_fid(folder, monkeypatch):
    for i in range(12):
        save(Path("photos/images") / f"{i}.jpg", seed=i, size=(40, 40))
    assert call("init photos --size 16") == 0
    *_, extractor, _ = commands(Path("photos/README.md"))
    assert call(f"{extractor} --steps 2 --batch-size 4 --data.num_workers=0") == 0
    config = Path("photos/config.yaml")
    text = re.sub(r"^    # (?=- class|  )", "    ", config.read_text(), flags=re.MULTILINE)
    config.write_text(text.replace("num_samples: 500", "num_samples: 4"))
    monkeypatch.chdir(folder / "cache")
    assert call(f"fit --config {folder}/photos/config.yaml {FEW} --trainer.max_steps=2") == 0
    assert (folder / "photos/run/evaluations.jsonl").exists()


@pytest.mark.parametrize("method", [None, *method_names()])
def test_the_config_is_that_of_the_method_and_keeps_the_rest(method):
    small = yaml.safe_load((shipped_configs() / "folder-small.yaml").read_text())["model"]
    text = build_config(Path("a: b"), Path("c #d"), 1000, 32, False, method or "velocity")
    config = yaml.safe_load(text)
    expected = {}
    if method:
        file = shipped_configs() / "methods" / f"{method}.yaml"
        expected = yaml.safe_load(file.read_text())["model"]["init_args"]
    arguments = config["model"]["init_args"]
    assert {name: arguments[name] for name in expected} == expected
    if method == "improved-diffusion":
        small["init_args"]["network"]["init_args"]["out_channels"] = 6
    same = small["init_args"].keys() - expected.keys() - {"num_classes", "label_dropout"}
    assert all(arguments[name] == small["init_args"][name] for name in same)
    assert (arguments["num_classes"], arguments["label_dropout"]) == (None, 0)
    data = config["data"]["init_args"]
    assert (data["train"], data["val"], data["image_size"]) == ("a: b", 50, 32)
    assert config["trainer"]["default_root_dir"] == "c #d/run"
    callbacks = [each["class_path"] for each in config["trainer"]["callbacks"]]
    assert [each.rpartition(".")[2] for each in callbacks] == ["SampleGrid", "EMA"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("new", "there is no folder"),
        ("new --images empty", "must hold four images or more"),
        ("new --images photos --size 30", "a multiple of 8 and at least 16, got 30."),
        ("new --images photos --method x", "invalid choice: 'x' (choose from 'velocity', 'ddpm'"),
        ("old --images photos", "old/config.yaml exists already; name another folder"),
        ("", "DIR must be given."),
    ],
)
def test_mistakes_are_refused_and_nothing_is_written(options, message, capsys):
    class_folders(Path("photos"))
    Path("empty").mkdir()
    Path("old").mkdir()
    Path("old/config.yaml").touch()
    assert call(f"init {options}") == 2
    assert message in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_path_may_have_any_characters_of_unicode():
    class_folders(Path("photos 🌷"))
    assert call("init 'new 🌷' --images 'photos 🌷'") == 0
    config = yaml.safe_load(Path("new 🌷/config.yaml").read_text())
    assert Path(config["data"]["init_args"]["train"]).samefile("photos 🌷")
    assert config["trainer"]["default_root_dir"] == str(Path("new 🌷/run").absolute())


@pytest.mark.parametrize("name", ["new\udcff", "new\n", "new\x85", ""])
def test_a_path_that_yaml_cannot_hold_is_refused(name, folder, capsys):
    class_folders(Path("photos"))
    assert main(["init", name, "--images", "photos"]) == 2
    error = capsys.readouterr().err
    assert ("not UTF-8" if name else "DIR must not be empty.") in error
    assert "Traceback" not in error
    assert [path.name for path in folder.iterdir()] == ["photos"]


@pytest.mark.parametrize("name", ["photos", "photos/new"])
def test_a_run_in_the_folder_of_images_is_refused(name, capsys):
    class_folders(Path("photos"))
    assert call(f"init {name} --images photos") == 2
    assert "is in the folder of images" in capsys.readouterr().err


@pytest.mark.parametrize("classes", ["auto", "none"])
@pytest.mark.parametrize(
    ("extra", "message"),
    [("empty", "photos/empty holds no images"), ("1.png", "images that are in none (1)")],
)
def test_images_that_the_data_module_refuses_are_refused(extra, message, classes, capsys):
    class_folders(Path("photos"))
    save(Path("photos/1.png")) if extra == "1.png" else Path("photos", extra).mkdir()
    with pytest.raises(ValueError, match=r"In no class folder|holds no images"):
        image_folder.ImageFolder("photos", val=2, image_size=8, strict=False).check()
    assert call(f"init new --images photos --classes {classes}") == 2
    assert message in capsys.readouterr().err
    assert not Path("new").exists()


def test_links_that_lead_back_are_not_followed():
    class_folders(Path("photos"))
    first = next(Path("photos").iterdir())
    (first / "loop").symlink_to(Path("photos").absolute())
    listing = image_folder.list_images(
        Path("photos"), image_folder.list_class_folders(Path("photos"))
    )
    assert init.count_images(Path("photos").absolute())[0] == len(listing.names) == 6


def test_class_folders_can_be_ignored(capsys):
    class_folders(Path("photos"))
    assert call("init flat --images photos --classes none") == 0
    assert "6 images with no classes" in capsys.readouterr().out
    assert "num_classes: null" in Path("flat/config.yaml").read_text()
    assert "--labels" not in Path("flat/README.md").read_text()
