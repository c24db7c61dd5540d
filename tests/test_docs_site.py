"""The docs site builds without a warning, and loads nothing from other hosts."""

import base64
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import lit_diffusion

for library in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
    pytest.importorskip(library, reason="pip install -e '.[docs]'")

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"
REFERENCE = "".join(path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))
PAGES = [*ROOT.glob("*.md")] + [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "reference"
]
INTERNAL = {
    *("cli", "config", "configs", "distributed", "files", "signals"),
    *("lab.compare", "lab.analysis.command", "lab.analysis.common"),
    "lab.analysis.fixed_losses",
    *("modules.checks", "modules.compiled", "modules.optimizers", "modules.sharding"),
    *("networks.layers", "networks.fused_norm", "networks.fused_norm_triton"),
    *("interchange.diffusers_dit", "interchange.diffusers_folder"),
    *(
        "interchange.diffusers_unet",
        "interchange.exported",
        "interchange.model_card",
        "interchange.published",
    ),
    *("checkpoints.averages", "checkpoints.loading", "checkpoints.reading"),
    "checkpoints.saving",
    *("data.cropped_images", "data.datasets", "data.loaders"),
    *("metrics.auxiliary_metrics", "metrics.images", "metrics.small_classifier"),
    "metrics.weight_files",
    *("solvers.steps", "solvers.ancestral", "solvers.exponential", "solvers.heun"),
}
"""Modules and packages without public names of their own."""


def load(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    spec = spec_from_file_location(f"docs_site_{name}", SITE / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_html(text: str) -> str:
    from markdown import Markdown

    extensions = [load("lists").Lists(), load("formulas").Formulas()]
    extensions += ["tables", "footnotes", "pymdownx.superfences"]
    return Markdown(extensions=extensions).convert(text)


def test_formulas_become_mathml():
    inline = "Noise: $x_t = \\alpha x_0 + \\sigma \\varepsilon$ and $`a_1`$."
    html = to_html(f"{inline}\n\n$$\n- a\n= b\n$$\n")
    assert html.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">') == 2
    assert html.count('display="block"') == 1
    assert "<msub><mi>x</mi><mi>t</mi></msub>" in html
    assert "$" not in html


@pytest.mark.parametrize(
    "text", ["`$x$`", "```bash\necho $A $B\n$$C$$\n```", "It costs $3 and $ 4.", "\\$x\\$", "a$x$b"]
)
def test_what_is_no_formula_is_left_alone(text):
    assert "<math" not in to_html(text)


@pytest.mark.parametrize(
    "text",
    [
        "* a\n  b:\n  * x\n  * y\n\n  more\n* c",
        "Text:\n* a\n* b\n\ntext\n1. one\n2. two",
        "1. a\n   * b\n2. c\n\n   ```bash\n   * d\n   ```",
        "text\n2. is no item",
        "text\n\n    code\n      more",
        "* a\n\n    is no code",
    ],
)
def test_lists_are_those_of_github(text):
    from markdown_it import MarkdownIt

    assert Tags(to_html(text)).count == Tags(MarkdownIt("commonmark").render(text)).count


def test_code_keeps_its_indent():
    assert "<code>a\n  b\n</code>" in to_html("text:\n\n    a\n      b\n")


@pytest.mark.parametrize("formula", [r"\nosuch x", r"\begin{aligned} a &= b \end{aligned}"])
def test_tex_that_is_not_understood_is_warned_about(formula, caplog):
    load("formulas").to_mathml(formula, "inline")
    assert formula in caplog.text


def test_a_notebook_becomes_a_page_with_its_outputs():
    image = base64.b64encode(b"png").decode()
    outputs = [
        {"output_type": "stream", "text": ["step 1\rstep 2\n", "\x1b[31mdone\x1b[0m\n"]},
        {"output_type": "display_data", "data": {"image/png": image, "text/plain": "<Figure>"}},
        {"output_type": "execute_result", "data": {"text/plain": "0.29"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": "fit()", "outputs": outputs},
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    content = json.dumps({"cells": cells})
    files = load("notebooks").convert("notebooks/a.ipynb", content)
    assert files.keys() == {"notebooks/a.md", "notebooks/a-0.png"}
    assert files["notebooks/a-0.png"] == b"png"
    page = files["notebooks/a.md"]
    assert page.startswith("# Title\n\nThis page is the notebook [a.ipynb]")
    assert "```python\nfit()\n```" in page
    assert "\nstep 2\ndone\n```" in page
    assert "![Output of the cell above](a-0.png)" in page
    assert "Figure" not in page
    assert "\n0.29\n" in page


@pytest.mark.parametrize(
    ("source", "page", "url", "expected"),
    [
        ("README.md", "index.md", "docs/runs.md#stop", "runs.md#stop"),
        ("README.md", "index.md", "configs/x.yaml", "https://host/blob/main/configs/x.yaml"),
        ("README.md", "index.md", "CHANGELOG.md", "changelog.md"),
        ("docs/runs.md", "runs.md", "../configs", "https://host/tree/main/configs"),
        ("docs/a/b.md", "a/b.md", "../../README.md", "../index.md"),
        ("docs/a/b.md", "a/b.md", "../runs.md", "../runs.md"),
        ("docs/runs.md", "runs.md", "a/b.ipynb", "a/b.md"),
        ("docs/runs.md", "runs.md", "https://other/x.md", "https://other/x.md"),
        ("docs/runs.md", "runs.md", "#stop", "#stop"),
        ("docs/runs.md", "runs.md", "../nowhere.md", "../nowhere.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(tmp_path, source, page, url, expected):
    from mkdocs.structure.files import File, Files

    (tmp_path / "configs").mkdir()
    for name in ("configs/x.yaml", "README.md", "CHANGELOG.md"):
        (tmp_path / name).touch()
    pages = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    links = load("links").RepositoryLinks(tmp_path, pages)
    names = ("index.md", "changelog.md", "runs.md", "a/b.md")
    links.files = Files([File(name, "docs", "site", False) for name in names])
    links.repository, links.source, links.page = "https://host", source, page
    assert links.rewrite(url) == expected


def test_names_of_classes_become_links_to_the_reference(tmp_path):
    from markdown import Markdown

    text = "::: a.b\n    options:\n      members: [\n        fun, UNet,\n        EMA\n      ]\n"
    (tmp_path / "nets.md").write_text(text)
    module = load("links")
    repository = module.RepositoryLinks(tmp_path, {})
    repository.page, repository.source = "concepts/x.md", "docs/concepts/x.md"
    html = Markdown(extensions=[module.ReferenceLinks(repository, tmp_path)]).convert(
        "# `EMA`\n\n`UNet(1, 2)`, `UNet.forward`, `fun`, [`EMA`](y.md) and *`EMA`*.\n\n    EMA"
    )
    links = re.findall('<a href="([^"]*)"><code>(.*?)</code></a>', html)
    target = "../reference/nets.md#a.b."
    assert links == [(f"{target}UNet", "UNet(1, 2)"), ("y.md", "EMA"), (f"{target}EMA", "EMA")]


def test_broken_links_and_files_of_other_hosts_are_found(tmp_path):
    page = (
        '<h1 id="top">a</h1><a href="b.html#here">x</a><a href="b.html#gone">x</a>'
        '<a href="c.html">x</a><a href="#top">x</a>'
        '<a href="https://elsewhere/x">x</a><img src="https://elsewhere/x.png">'
        '<script src="a.js"></script><link rel="stylesheet" href="//fonts/x.css">'
    )
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.js").touch()
    (tmp_path / "a.css").write_text("a { background: url(https://elsewhere/x.png) }")
    problems = load("links").check_site(tmp_path)
    found = {re.search(r"b.html#gone|c.html|x.png|x.css|a.css", line)[0] for line in problems}
    assert found == {"b.html#gone", "c.html", "x.png", "x.css", "a.css"}
    assert len(problems) == 5


def test_docstrings_keep_their_characters():
    text = load("docstrings").to_markdown(
        "Average.\n\n    a[i][j] < `b[i][j] < c`\n\nSource: Ho.\n\n"
        "Example:\n    >>> f(1)\n    [1, 2]"
    )
    assert "a[i]\\[j] &lt; `b[i][j] < c`" in text
    assert "**Source:** Ho." in text
    assert "Examples:\n    >>> f(1)\n    [1, 2]" in text


def test_every_module_is_documented_or_internal():
    documented = set(re.findall(r"^::: lit_diffusion\.([\w.]+)", REFERENCE, re.MULTILINE))
    modules = {
        ".".join(path.relative_to(ROOT / "lit_diffusion").with_suffix("").parts)
        for path in (ROOT / "lit_diffusion").rglob("*.py")
        if not path.name.startswith("_")
    }
    internal = {name for name in modules if any(f"{name}.".startswith(f"{i}.") for i in INTERNAL)}
    assert modules - internal - documented == set()
    assert documented & internal == set()
    assert documented - modules <= {"callbacks", "checkpoints", "interchange", "solvers"} | {
        name for name in documented if name.startswith("callbacks.")
    }


class Tags(HTMLParser):
    """How often each tag that gives a page its structure occurs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.count = Counter()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in {"h1", "h2", "h3", "h4", "ul", "ol", "li", "tr", "pre", "img", "blockquote"}:
            self.count[tag] += 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_the_same_lists_tables_and_code_on_the_site_and_on_github(path):
    from markdown_it import MarkdownIt

    text = path.read_text()
    github = MarkdownIt("commonmark").enable("table").render(text)
    assert Tags(to_html(text)).count == Tags(github).count


def test_the_overview_has_the_names_that_the_package_itself_exports():
    overview = (ROOT / "docs/reference/index.md").read_text()
    assert sorted(re.findall(r"\[`(\w+)`\]\[lit_diffusion\.", overview)) == lit_diffusion.__all__


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, built as CI builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--config-file", SITE / "mkdocs.yml", "--site-dir"]
    result = subprocess.run(
        [sys.executable, "-m", *command, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(built):
    """The hooks check its links, and that no file comes from another host."""
    for name in ("index", "contributing", "changelog", "runs", "results/digits"):
        assert (built / f"{name}.html").exists()
    assert not (built / "site").exists()
    assert "api.github.com" not in (built / "index.html").read_text()
    assert 'data-md-component="source"' not in (built / "index.html").read_text()


@pytest.mark.slow
def test_names_of_the_reference_pages_are_in_the_built_pages(built):
    html = "".join(path.read_text() for path in (built / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="(lit_diffusion[\w.]*)"', html))
    pages = re.findall(r"^::: ([\w.]+)\n.*?\[(.*?)\]", REFERENCE, re.MULTILINE | re.DOTALL)
    for module, names in pages:
        missing = {f"{module}.{name}" for name in re.findall(r"\w+", names)} - anchors
        assert missing == set()


@pytest.mark.slow
def test_the_search_index_has_classes_and_studies(built):
    index = json.loads((built / "search/search_index.json").read_text())
    titles = {entry["title"] for entry in index["docs"]}
    assert any("MinSNR" in title for title in titles)
    assert any("Stability" in title or "stable" in title for title in titles)
