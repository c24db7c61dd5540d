"""What README.md and the pages of docs/ say is so: every block of code runs."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from support.tiny_diffusion import images, tiny_diffusion

from lit_diffusion.callbacks.evaluation import averaged_weights
from lit_diffusion.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}


def blocks(language: str, pages: dict[str, str] = PAGES) -> dict[str, str]:
    """Code by page and number."""
    return {
        f"{name}-{number}": code
        for name, text in pages.items()
        for number, code in enumerate(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))
    }


FOREIGN = (ROOT / "tests/integration/foreign_project.py").read_text()
PYTHON = blocks("python")
TRAINED = {key for key, code in PYTHON.items() if 'load("runs/digits"' in code}
(QUICK_START,) = [code for code in blocks("python", {"": README}).values() if "Digits(" in code]


def run(code: str, monkeypatch, folder: Path) -> dict:
    monkeypatch.chdir(folder)
    names = {"__name__": "page"}
    exec(compile(code, "page.md", "exec", dont_inherit=True), names)
    return names


def weights_by_name(callback) -> list[str]:
    """What happens to a module with averages of its own when a callback asks for "ema"."""
    happened = []

    class Module(LightningModule):
        @contextmanager
        def ema_scope(self):
            happened.append("in")
            yield
            happened.append("out")

    trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    callback.setup(trainer, Module(), "fit")
    with averaged_weights(trainer) as name:
        assert name == "ema"
        happened.append("measured")
    return happened


def adapters_train(names) -> None:
    """Every parameter of diffusers' networks learns in our module, and labels of none count."""
    unet = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    unet |= {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "patch_size": 2}
    sizes = {"num_classes": 3, "in_channels": 1, "out_channels": 1, "sample_size": 8}
    for name, config in (("DiffusersUNet", unet), ("DiffusersDiT", dit)):
        torch.manual_seed(0)
        module = tiny_diffusion(network=names[name](**sizes, **config))
        before = {n: p.clone() for n, p in module.network.named_parameters()}
        trainer = Trainer(max_steps=3, logger=False, accelerator="cpu", enable_checkpointing=False)
        trainer.fit(module, images(8, 4))
        unmoved = [n for n, p in module.network.named_parameters() if torch.equal(p, before[n])]
        assert unmoved == []
        zero, one, none = module.generate([5, 5, 5], torch.tensor([0, 1, -1]))
        assert zero.shape == (1, 8, 8)
        assert not any(torch.equal(a, b) for a, b in ((zero, one), (zero, none), (one, none)))


def test_every_fenced_block_is_one_that_is_run():
    languages = {found for text in PAGES.values() for found in re.findall(r"```(\w+)\n", text)}
    assert languages == {"bash", "python"}


def test_readme_fits_about_one_screen_and_begins_with_the_two_commands():
    assert len(README.splitlines()) <= 125
    commands = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[:2]
    assert [c.strip() for c in commands] == [
        "pip install -e . -c constraints.txt && lit-diffusion fit --config configs/digits.yaml",
        'pip install -e ".[test]" -c constraints.txt && pytest',
    ]
    assert commands[1].strip() in (ROOT / ".ci" / "run").read_text()


def test_the_foreign_project_shown_is_the_one_that_is_tested():
    assert FOREIGN in PYTHON.values()


@pytest.mark.parametrize("key", sorted(PYTHON.keys() - TRAINED))
def test_python_runs_as_shown(key, monkeypatch, tmp_path):
    for library in ("diffusers", "transformers"):
        if f"from {library}" in PYTHON[key]:
            pytest.importorskip(library, reason="pip install lit-diffusion[diffusers]")
    code = PYTHON[key].replace("max_steps=2000", "max_steps=2").replace("500_000", "5")
    names = run(code, monkeypatch, tmp_path)
    if "images" in names:
        assert names["images"].shape == (64, 1, 8, 8)
    if "averaged" in names:
        assert not torch.equal(names["averaged"], names["module"].network.weight)
        assert torch.equal(names["averaged"], names["loaded"].network.weight)
    if "LitEmaWeights" in names:
        assert weights_by_name(names["LitEmaWeights"]()) == ["in", "measured", "out"]
    if "DiffusersUNet" in names:
        adapters_train(names)
    if "density" in names:
        assert names["density"].sum() == pytest.approx(1)


SHORT = """
lit-diffusion() {
    local short="--trainer.limit_val_batches=2 --trainer.limit_test_batches=1"
    case $1 in
        fit) steps=$((steps + 4)); command lit-diffusion "$@" $short --trainer.max_steps=$steps ;;
        test) command lit-diffusion "$@" $short ;;
        sweep) command lit-diffusion "$@" --seeds 0 $short --trainer.max_steps=4 ;;
        evaluate) command lit-diffusion "$@" --extractor digits-cnn ;;  # no FID in so few steps
        analyze)
            [ $2 = consistency ] && few="--extractor digits-cnn" || few="--images 8 --levels 0.5"
            command lit-diffusion "$@" $few ;;
        *) command lit-diffusion "$@" ;;
    esac
}
set -ex
"""
"""Before the commands of a page: the same ones, in few steps."""

WANDB = find_spec("wandb") is not None

ELSEWHERE = {
    "README.md-0": "fit is run again below, and CI runs the command itself",
    "README.md-1": "by CI",
    "cluster.md-0": "by tests/integration/test_cluster.py, under a real SLURM",
    "cluster.md-1": "likewise, on two nodes",
    "latents.md-0": "by tests/cli/test_encode.py and test_configs.py, with small VAEs",
    "loggers.md-0": "by CI, with the extra named loggers",
    "streaming.md-0": "by tests/data/test_streaming.py, with digits",
    "streaming.md-1": "likewise",
    "methods.md-1": "sbatch; test_sweep.py runs the lines that --print gives",
}


def test_what_is_run_elsewhere_is_there():
    assert ELSEWHERE.keys() <= blocks("bash").keys()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "runs.md",
        "methods.md",
        "evaluation.md",
        "interchange.md",
        "analysis.md",
        pytest.param("loggers.md", marks=pytest.mark.skipif(not WANDB, reason="needs wandb")),
    ],
)
def test_commands_run_as_shown(page, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shown = [c for k, c in blocks("bash", {page: PAGES[page]}).items() if k not in ELSEWHERE]
    before = ""
    if page == "evaluation.md":  # whose runs and samples are made on another page
        before = "lit-diffusion fit --config configs/digits.yaml\n"
        before += "lit-diffusion sample --checkpoint runs/digits --out samples\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join([SHORT, before, *shown])],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if page == "README.md":
        for key in TRAINED:
            assert run(PYTHON[key], monkeypatch, tmp_path)["images"].shape == (64, 1, 8, 8)


@pytest.mark.slow
def test_the_quick_start_gives_digits(monkeypatch, tmp_path):
    images = run(QUICK_START, monkeypatch, tmp_path)["images"]
    digits, labels = [], []
    for batch in run(QUICK_START.split("module =")[0], monkeypatch, tmp_path)["Digits"]().in_order(
        "train"
    ):
        digits.append(batch[0])
        labels.append(batch[1])
    distance = torch.cdist(images.flatten(1).float(), torch.cat(digits).flatten(1).float())
    recognised = torch.cat(labels)[distance.argmin(1)] == torch.arange(64) % 10
    assert recognised.double().mean() > 0.8


def test_files_and_commands_that_are_named_exist():
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for path in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (folder / path).exists(), f"{name}: {path}"
        for path in re.findall(r"configs/\w+\.yaml", text):
            assert (ROOT / path).exists(), f"{name}: {path}"
        assert set(re.findall(r"`?lit-diffusion ([a-z-]+) ", text)) <= {*COMMANDS, "lines"}
