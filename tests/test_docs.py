"""The code in README.md, docs/, CONTRIBUTING.md and docstrings runs and does what it says."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from support.toy import gaussian_denoiser

from lit_diffusion.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FILES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/get-started/*.md")]
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in FILES}
PAGES["README.md"] = README


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
        make_trainer(".", max_steps=3, max_epochs=-1).fit(module, images(8, 4))
        parameters = module.network.named_parameters()
        assert [n for n, p in parameters if torch.equal(p, before[n])] == []
        zero, one, none = module.generate([5, 5, 5], torch.tensor([0, 1, -1]))
        assert zero.shape == (1, 8, 8)
        assert not any(torch.equal(a, b) for a, b in ((zero, one), (zero, none), (one, none)))


def test_every_fenced_block_is_one_that_is_run():
    assert set(re.findall(r"```(\w+)\n", "".join(PAGES.values()))) == {"bash", "python"}


def test_ci_runs_the_command_that_the_readme_names_for_tests():
    install, tests = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[:2]
    assert "lit-diffusion fit --config configs/digits.yaml" in install
    assert tests.strip() in (ROOT / ".ci" / "run").read_text()


def test_the_foreign_project_shown_is_the_one_that_is_tested():
    assert FOREIGN in PYTHON.values()


@pytest.mark.parametrize("key", sorted(PYTHON.keys() - TRAINED))
def test_python_runs_as_shown(key, monkeypatch, tmp_path):
    for library in re.findall("from (diffusers|transformers)", PYTHON[key]):
        pytest.importorskip(library, reason="pip install -e '.[diffusers]'")
    code = PYTHON[key].replace("max_steps=900", "max_steps=2").replace("500_000", "5")
    code = code.replace("DPMSolverPP(steps=20)", "DPMSolverPP(steps=2)")
    names = run(code, monkeypatch, tmp_path)
    if "images" in names:
        assert names["images"].shape == (64, 1, 8, 8)
    if "averaged" in names:
        assert not torch.equal(names["averaged"], names["module"].network.weight)
        assert torch.equal(names["averaged"], names["loaded"].network.weight)
    if "DiffusersUNet" in names:
        adapters_train(names)
    if "density" in names:
        assert names["density"].sum() == pytest.approx(1)


WANDB = find_spec("wandb") is not None

ELSEWHERE = {
    "README.md-0": "fit is run before what is below, and CI runs the command itself",
    "README.md-1": "by CI",
    "install.md-0": "by CI, from the wheel",
    "cluster.md-0": "by tests/integration/test_cluster.py, under a real SLURM",
    "cluster.md-1": "likewise, on two nodes",
    "get-started/digits.md-0": "as README.md-0",
    "get-started/own-images.md-0": "by tests/cli/test_init.py, on a small folder",
    "get-started/own-images.md-1": "likewise",
    "get-started/own-images.md-2": "likewise",
    "get-started/own-images.md-3": "as README.md-3",
    "get-started/own-project.md-0": "by CI",
    "evaluation.md-1": "hours of a GPU, and a network; tests/test_configs.py parses the config",
    "evaluation.md-2": "by tests/cli/test_solver_comparison.py",
    "fine-tune.md-1": "by tests/interchange/test_published.py, with small networks",
    "gpu.md-0": "by tests/integration/test_gpu_benchmark.py and tests/modules/test_compiled.py",
    "gpu.md-1": "options of configs/cifar10-improved.yaml, which test_configs.py parses",
    **{f"RELEASE.md-{n}": "for maintainers" for n in range(11)},
    "interchange.md-2": "needs an account; tests/interchange/test_model_card.py reads the card",
    "interchange.md-3": "likewise; tests/test_pretrained.py loads an exported folder",
    "latents.md-0": "by tests/cli/test_encode.py and test_configs.py, with small VAEs",
    "loggers.md-0": "by CI, with the extra named loggers",
    "streaming.md-0": "by tests/data/test_streaming.py, with digits",
    "streaming.md-1": "likewise",
    "migration.md-0": "parsed below",
    "migration.md-1": "parsed below",
    "migration.md-2": "parsed below",
    "compare.md-1": "sbatch; test_sweep.py runs the lines that --print gives",
}


def test_what_is_run_elsewhere_is_there():
    assert ELSEWHERE.keys() <= blocks("bash").keys()


FEW = "--trainer.limit_val_batches=2 --trainer.callbacks.FIDEvaluation.num_samples=72"
SHORT = {
    "fit": f"{FEW} --trainer.limit_test_batches=1",
    "test": "--trainer.limit_val_batches=2 --trainer.limit_test_batches=1",
    "sweep": f"{FEW} --seeds 0 --trainer.max_steps=4",
    "analyze consistency": "",
    "analyze": "--images 8 --levels 0.5",
}
"""What makes a command of a page quick, by its first words."""


USE_DIGITS = {"README.md", "analysis.md", "evaluation.md", "fine-tune.md", "interchange.md"}
USE_DIGITS |= {"get-started/digits.md"}
"""Pages that use the run of README's first command."""


def run_commands(page: str) -> None:
    """Run the commands of a page in the current folder, in few steps."""
    commands = [
        code for key, code in blocks("bash", {page: PAGES[page]}).items() if key not in ELSEWHERE
    ]
    if page in USE_DIGITS:
        commands.insert(0, "lit-diffusion fit --config configs/digits.yaml")  # README's first
    if page == "evaluation.md":
        commands.insert(1, "lit-diffusion sample --checkpoint runs/digits --out samples")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    steps = 0
    for line in "\n".join(commands).replace("\\\n", " ").splitlines():
        command = line.partition("lit-diffusion ")[2] if line.startswith("lit-") else line
        if command == line:
            subprocess.run(["bash", "-ec", line], check=True, env=environment)
            continue
        words = subprocess.check_output(["bash", "-c", f"printf '%s\n' {command}"], text=True)
        arguments = words.splitlines()
        first = next((key for key in SHORT if command.startswith(key)), None)
        arguments += SHORT[first].split() if first else []
        if first == "fit":
            steps += 4
            arguments += [f"--trainer.max_steps={steps}"]
        assert main(arguments) == 0, arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "get-started/digits.md",
        "runs.md",
        "gpu.md",
        "fine-tune.md",
        pytest.param("compare.md", marks=pytest.mark.rare),  # sweeps as README.md does
        "evaluation.md",
        "interchange.md",
        "analysis.md",
        pytest.param("loggers.md", marks=pytest.mark.skipif(not WANDB, reason="needs wandb")),
    ],
)
def test_commands_run_as_shown(page, monkeypatch, folder):
    Path("configs").symlink_to(ROOT / "configs")
    run_commands(page)
    if page == "README.md":
        for key in TRAINED:
            assert run(PYTHON[key], monkeypatch, folder)["images"].shape == (64, 1, 8, 8)


@pytest.mark.parametrize("key", ["migration.md-0", "migration.md-1", "migration.md-2"])
def test_commands_of_the_migration_page_are_valid_configs(key, monkeypatch, folder, capsys):
    Path("configs").symlink_to(ROOT / "configs")
    command = blocks("bash")[key].replace("\\\n", " ").removeprefix("lit-diffusion ")
    assert main([*command.split(), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["init_args"]["train"] == "PICTURES"
    assert printed["model"]["init_args"]["process"]["class_path"].startswith("lit_diffusion.")


@pytest.mark.slow
def test_the_quick_start_gives_digits(monkeypatch, tmp_path):
    """In a seventh of its steps."""
    names = run(QUICK_START.replace("max_steps=900", "max_steps=300"), monkeypatch, tmp_path)
    images, labels = map(
        torch.cat, list(zip(*names["ld"].Digits().in_order("train"), strict=True))[:2]
    )
    distance = torch.cdist(names["images"].flatten(1).float(), images.flatten(1).float())
    recognised = labels[distance.argmin(1)] == torch.arange(64) % 10
    assert recognised.double().mean() > 0.8


def test_files_and_commands_that_are_named_exist():
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else (ROOT / "docs" / name).parent
        for path in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (folder / path).exists(), f"{name}: {path}"
        for path in re.findall(r"configs/\w+\.yaml", text):
            assert (ROOT / path).exists(), f"{name}: {path}"
        assert set(re.findall(r"`?lit-diffusion ([a-z-]+) ", text)) <= {*COMMANDS, "lines"}


# The examples of CONTRIBUTING.md


@pytest.fixture(scope="module")
def examples():
    names = {"__name__": "contributing"}
    for code in blocks("python", {"": (ROOT / "CONTRIBUTING.md").read_text()}).values():
        exec(compile(code, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_the_solver_converges_with_order_one_on_a_gaussian(examples, scale):
    process = examples["Trigonometric"]()
    denoise = gaussian_denoiser(process, mean=0.0, std=scale)
    noise = torch.randn(64, 1, 1, 1, dtype=torch.float64)

    def error(steps):
        solver = examples["Deterministic"](steps)
        solver.check(process)
        x0 = solver.sample(denoise, process, noise, torch.randn_like)
        return (x0 / (scale * noise) - 1).abs().max()

    assert 1.7 < error(100) / error(200) < 2.3


def test_all_four_train_and_sample_together(examples, tmp_path):
    network = examples["Perceptron"]()
    options = {"process": examples["Trigonometric"](), "solver": examples["Deterministic"](10)}
    module = tiny_diffusion(network=network, num_classes=None, label_dropout=0.0, **options)
    noise_labels = []
    network.register_forward_pre_hook(lambda _, args: noise_labels.append(args[1]))
    curriculum = examples["NoisyHalfFirst"](2)
    make_trainer(tmp_path, curriculum).fit(module, images(256, 64))
    middle = 1000 * (0.01 + 1.56) / 2
    assert [bool((labels > middle).all()) for labels in noise_labels] == [True, True, False, False]
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert module.generate(range(3)).shape == (3, 1, 8, 8)


# The examples of docstrings

SOURCES = [*(ROOT / "lit_diffusion").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
EXAMPLES = sorted(file for file in SOURCES if ">>> " in file.read_text())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_hold(file):
    torch.manual_seed(0)
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(f"lit_diffusion.{name.removeprefix('lit_diffusion.')}")
    results = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
