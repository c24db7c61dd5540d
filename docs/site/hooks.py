"""What the docs site needs beyond plugins; MkDocs calls the functions named `on_...`.

Pages are made of README.md, CONTRIBUTING.md, CHANGELOG.md and the notebooks, links that leave docs/
become links to the repository, formulas become MathML, mkdocstrings gets a source tree that holds
lit_diffusion.callbacks, and the built pages are checked.
"""

import logging
import tempfile
from pathlib import Path

import links
import notebooks
from formulas import Formulas
from lists import Lists
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages whose source lies outside docs/, by their path on the site."""

log = logging.getLogger("mkdocs.hooks")
repository_links = links.RepositoryLinks(ROOT, {source: uri for uri, source in OUTSIDE.items()})
merged = tempfile.TemporaryDirectory(prefix="lit-diffusion-docs-")


def merge_packages(folder: Path) -> None:
    """Make `folder`/lit_diffusion of links, as an installation has it: with callbacks/ inside."""
    package = folder / "lit_diffusion"
    if package.exists():
        return
    package.mkdir()
    for path in (ROOT / "lit_diffusion").iterdir():
        (package / path.name).symlink_to(path)
    (package / "callbacks").symlink_to(ROOT / "callbacks")


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Hand the merged source tree to mkdocstrings, and our extensions to Markdown."""
    merge_packages(Path(merged.name))
    python = config.plugins["mkdocstrings"].config["handlers"]["python"]
    python["paths"] = [merged.name]
    python["options"]["extensions"] = [str(Path(__file__).parent / "docstrings.py")]
    python["options"]["extra"] = {"repository": f"{config.repo_url}/blob/main"}
    repository_links.repository = str(config.repo_url).rstrip("/")
    names = links.ReferenceLinks(repository_links, ROOT / "docs" / "reference")
    config.markdown_extensions[:0] = [Lists(), repository_links, names, Formulas()]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages whose source is no Markdown file of docs/."""
    for uri, source in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    style = str(Path(__file__).parent / "site.css")
    files.append(File.generated(config, "site.css", abs_src_path=style))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        for uri, content in notebooks.convert(file.src_uri, file.content_string).items():
            files.append(File.generated(config, uri, content=content))
    repository_links.files = files
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tell the link rewriter where the page lies in the repository."""
    uri = page.file.src_uri
    repository_links.page = uri
    repository_links.source = OUTSIDE.get(uri, f"docs/{uri}")
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]  # the home page is alone in its tab
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Warn, and so fail a strict build, of broken links and of files from other hosts."""
    for problem in links.check_site(Path(config.site_dir)):
        log.warning(problem)
