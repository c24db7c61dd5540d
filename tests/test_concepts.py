"""The pages of docs/concepts/: code runs and prints what it says, tables name what there is."""

import ast
import inspect
import re
from math import inf
from pathlib import Path

import pytest
import torch
from support.commands import call
from support.toy import gaussian_denoiser

from lit_diffusion import (
    codecs,
    conditioning,
    grids,
    guidance,
    losses,
    parameterizations,
    processes,
    solvers,
    timesteps,
)
from lit_diffusion.callbacks import EMA, curriculum, loss_resampler
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.cli.main import COMMANDS
from lit_diffusion.modules.vae import VAECodec
from lit_diffusion.networks import conditions

FOLDER = Path(__file__).parent.parent / "docs" / "concepts"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
NAMES = [
    "process",
    "parameterization",
    "loss",
    "times",
    "solver",
    "guidance",
    "condition",
    "codec",
    "ema",
]


def blocks(language: str) -> dict[str, str]:
    """Code by page and number."""
    return {
        f"{name}-{number}": code
        for name, text in PAGES.items()
        for number, code in enumerate(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))
    }


PYTHON, YAML = blocks("python"), blocks("yaml")


def expected_output(code: str) -> list[str]:
    """The comments after a print, on its line or below it; none if a print has no comment."""
    lines, expected = code.splitlines(), []
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("print("):
            continue
        below = [re.fullmatch(r"\s*# (.*)", each) for each in lines[number + 1 :]]
        count = next((i for i, match in enumerate(below) if match is None), len(below))
        comments = [line.split("  # ")[1]] if "  # " in line else [m[1] for m in below[:count]]
        assert comments, f"{line} has no comment with its output"
        expected += comments
    return expected


def run(code: str) -> tuple[dict, list[str]]:
    """The names that the code defines, and the lines that it prints."""
    printed: list[str] = []

    def record(*values: object) -> None:
        printed.extend(" ".join(map(str, values)).splitlines())

    names = {"__name__": "page", "print": record}
    exec(compile(code, "page.md", "exec", dont_inherit=True), names)
    return names, printed


def test_there_is_a_page_for_each_concept():
    assert sorted(PAGES) == sorted(NAMES)


@pytest.mark.parametrize("key", PYTHON)
def test_python_prints_what_the_page_says(key, monkeypatch, tmp_path):
    if "transformers" in PYTHON[key]:
        pytest.importorskip("transformers", reason="pip install -e '.[diffusers]'")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names, printed = run(PYTHON[key])
    assert printed == expected_output(PYTHON[key])
    if "density" in names:
        assert names["density"].sum() == pytest.approx(1)


def test_every_fenced_block_is_python_yaml_or_bash():
    languages = set(re.findall(r"```(\w+)\n", "".join(PAGES.values())))
    assert languages <= {"python", "yaml"}


@pytest.mark.quick("condition-1", "times-0")
@pytest.mark.filterwarnings("ignore:guidance with scale")  # the network is not trained
@pytest.mark.parametrize("key", YAML)
def test_a_setting_is_one_that_the_digits_train_with(key, folder):
    Path("settings.yaml").write_text(YAML[key])
    digits = FOLDER.parents[1] / "configs" / "digits.yaml"
    options = "--trainer.fast_dev_run=1 --trainer.accelerator=cpu"
    assert call(f"fit --config {digits} --config settings.yaml {options}") == 0


def test_every_page_shows_its_figure_and_they_are_small():
    shown = {name: re.findall(r"!\[[^\]]{20,}\]\((\S+)\)", text) for name, text in PAGES.items()}
    assert shown == {name: [f"{name}.png"] for name in PAGES}
    sizes = [path.stat().st_size for path in FOLDER.glob("*.png")]
    assert len(sizes) == len(PAGES)
    assert sum(sizes) < 600_000


def test_links_lead_to_files_and_headings():
    for name, text in PAGES.items():
        for path, _, heading in re.findall(r"\]\(((?!http)[^)#]+)(#([^)]+))?\)", text):
            target = FOLDER / path
            assert target.exists(), f"{name}: {path}"
            if heading:
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                assert heading in {
                    re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
                }


def test_configs_and_commands_that_are_named_exist():
    for name, text in PAGES.items():
        for path in re.findall(r"configs/[\w/-]+\.yaml", text):
            assert (FOLDER.parents[1] / path).exists(), f"{name}: {path}"
        assert set(re.findall(r"`lit-diffusion ([a-z-]+) ", text)) <= {*COMMANDS}, name


def test_formulas_can_be_shown_as_mathml():
    why = "pip install -e '.[docs]'"
    converter = pytest.importorskip("latex2mathml.converter", reason=why)
    for text in PAGES.values():
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        displayed = re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL)
        inline = re.findall(r"\$([^$]+)\$", re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL))
        assert displayed
        for formula in displayed + inline:
            assert "\\" not in re.sub("<[^>]*>", "", converter.convert(formula)), formula


# Tables of classes

FILES = {
    "process": [processes],
    "parameterization": [parameterizations],
    "loss": [losses],
    "times": [timesteps, curriculum, loss_resampler],
    "solver": [solvers, grids],
    "guidance": [guidance],
    "condition": [conditioning, conditions],
    "codec": [codecs],
    "ema": [],
}
NOT_CONCEPTS = {"BetaSchedule", "ConditionKind", "EmbeddedCondition"}  # protocols and a result
NOT_CONCEPTS |= {"LabelEmbedding", "VectorEmbedding", "TokenEmbedding", "WordEmbedding"}
NOT_CONCEPTS |= {"LossBasedDensity", "LossHistory", "NormalizedHistory"}
NOT_CONCEPTS |= {"TimestepWriter", "Timesteps"}
ELSEWHERE = {"codec": {"VAECodec": VAECodec}, "ema": {"EMA": EMA, "PowerEMA": PowerEMA}}


def classes_of(page: str) -> dict[str, type]:
    """The public classes that a page is about, by name."""
    found = dict(ELSEWHERE.get(page, {}))
    for module in FILES[page]:
        prefix = module.__name__
        found |= {
            name: value
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__.startswith(prefix)
        }
    return {n: v for n, v in found.items() if n[0] != "_" and n not in NOT_CONCEPTS}


def listed(page: str) -> dict[str, ast.Call]:
    """The calls in the first column of the page's tables, by name of the class."""
    cells = re.findall(r"^\| `(\w+\(.*?\))` \|", PAGES[page], re.MULTILINE)
    calls = [ast.parse(cell, mode="eval").body for cell in cells]
    return {call.func.id: call for call in calls if isinstance(call, ast.Call)}


@pytest.mark.parametrize("page", NAMES)
def test_tables_list_every_class_with_its_arguments(page):
    calls, classes = listed(page), classes_of(page)
    assert classes.keys() <= calls.keys()
    for name, cls in classes.items():
        parameters = inspect.signature(cls).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        optional = {p.name: p.default for p in parameters if p.default is not p.empty}
        call = calls[name]
        assert [arg.id for arg in call.args] == required, name
        values = {k.arg: eval(ast.unparse(k.value), {"inf": inf}) for k in call.keywords}
        assert values == optional, name
        assert list(values) == list(optional), name


# The classes of "Write your own"


def own(name: str) -> object:
    """A class that a page defines."""
    (code,) = [code for code in PYTHON.values() if f"class {name}" in code]
    return run(code)[0][name]


def test_the_process_inverts_its_snr():
    process = own("CosineVP")()
    t = torch.linspace(process.t_min, process.t_max, 101, dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(t)
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones_like(t))
    torch.testing.assert_close(process.at_log_snr(2 * (alpha / sigma).log()), t)
    alpha, sigma = process.alpha_sigma(torch.tensor(process.t_clean))
    assert (alpha, sigma) == (1, 0)


def test_the_parameterization_has_the_output_scale_that_it_says():
    parameterization = own("Residual")()
    x_t, output = torch.randn(2, 2, 1, 4, 4)
    scales = torch.full((2, 1, 1, 1), 0.6), torch.full((2, 1, 1, 1), 0.8)
    before, after = (parameterization.to_x0(F, x_t, *scales) for F in (output, output + 1))
    scale = parameterization.output_scale(*scales).expand_as(x_t)
    torch.testing.assert_close((after - before).abs(), scale)


def test_the_times_rise_with_u_and_stay_within_the_process():
    process = processes.LinearFlow()
    t = own("ModeSampling")().quantile(torch.linspace(0, 1, 1001), process)
    assert (t.diff() >= 0).all()
    assert t.min() >= process.t_min
    assert t.max() <= process.t_max


def test_the_solver_is_of_second_order():
    process, solver = processes.ContinuousVP(), own("AdamsBashforth")
    denoise = gaussian_denoiser(process, mean=0.0, std=0.5)
    noise = torch.ones(1, 1, 1, 1, dtype=torch.float64)

    def error(steps):
        return abs(solver(steps).sample(denoise, process, noise, torch.randn_like).item() - 0.5)

    assert 3 < error(100) / error(200) < 5
