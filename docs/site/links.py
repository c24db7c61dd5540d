"""Links of the pages: rewritten for the site, added from names to the reference, and checked."""

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.structure.files import Files


class RepositoryLinks(Extension):
    """Relative links, which hold in the repository, become links that hold on the site.

    A file that is no page or picture of the site is linked where the repository is hosted. What is
    in neither is left to MkDocs, which warns.

    Args:
        root: folder of the checkout.
        pages: paths on the site of sources outside docs/.
    """

    def __init__(self, root: Path, pages: dict[str, str]) -> None:
        super().__init__()
        self.root = root
        self.pages = pages
        self.files = Files([])
        self.repository = ""
        self.page = ""
        self.source = ""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the rewriter, before MkDocs' own (0)."""
        md.treeprocessors.register(_Rewriter(md, self), "repository-links", 5)

    def rewrite(self, url: str) -> str:
        """The link as the site needs it; REPOSITORY:path is a file at the repository's host."""
        if url.startswith("REPOSITORY:"):
            return f"{self.repository}/blob/main/{url.removeprefix('REPOSITORY:')}"
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
            return url
        path = posixpath.join(posixpath.dirname(self.source), unquote(parts.path))
        path = posixpath.normpath(path)
        for uri in self._on_site(path):
            file = self.files.get_file_from_path(uri)
            if file is not None and not file.inclusion.is_excluded():
                page = posixpath.relpath(uri, posixpath.dirname(self.page))
                return parts._replace(path=page).geturl()
        target = self.root / path
        if path.startswith("..") or not target.exists():
            return url
        kind = "tree" if target.is_dir() else "blob"
        return parts._replace(path=f"{self.repository}/{kind}/main/{path}").geturl()

    def _on_site(self, path: str) -> Iterator[str]:
        """Paths on the site that a path in the repository may have."""
        if path in self.pages:
            yield self.pages[path]
        uri = path.removeprefix("docs/")
        if uri != path:
            yield uri
            yield re.sub(r"\.ipynb$", ".md", uri)
            yield f"{uri}/index.md"
            yield f"{uri}/README.md"


class _Rewriter(Treeprocessor):
    def __init__(self, md: Markdown, links: RepositoryLinks) -> None:
        super().__init__(md)
        self.links = links

    def run(self, root: Element) -> None:
        for tag, key in (("a", "href"), ("img", "src")):
            for element in root.iter(tag):
                if url := element.get(key):
                    element.set(key, self.links.rewrite(url))


class ReferenceLinks(Extension):
    """Class names in backticks, as `UNet` or `UNet(...)`, become links to the API reference.

    Args:
        links: knows the page. The extension must be registered before it.
        reference: folder of the pages that list the names.
    """

    def __init__(self, links: RepositoryLinks, reference: Path) -> None:
        super().__init__()
        self.links = links
        self.targets = reference_targets(reference)

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the linker, before the rewriter of links (5)."""
        md.treeprocessors.register(_NameLinker(md, self), "reference-links", 6)


class _NameLinker(Treeprocessor):
    def __init__(self, md: Markdown, extension: ReferenceLinks) -> None:
        super().__init__(md)
        self.extension = extension

    def run(self, root: Element) -> None:
        if not self.extension.links.page.startswith("reference/"):
            self._link(root)

    def _link(self, element: Element) -> None:
        for position, child in enumerate(element):
            if child.tag == "code":
                name = re.fullmatch(r"([A-Z]\w+)(\(.*\))?", child.text or "")
                if name and name[1] in self.extension.targets:
                    folder = posixpath.dirname(self.extension.links.page)
                    target = posixpath.relpath(self.extension.targets[name[1]], folder)
                    link = Element("a", {"href": target})
                    link.tail, child.tail = child.tail, None
                    link.append(child)
                    element[position] = link
            elif child.tag not in {"a", "pre", "h1", "h2", "h3", "h4"}:
                self._link(child)


def reference_targets(folder: Path) -> dict[str, str]:
    """Page and anchor of each class in the API reference, by its name."""
    pattern = re.compile(
        r"^::: ([\w.]+)\n\s+options:\n\s+members: \[(.*?)\]", re.MULTILINE | re.DOTALL
    )
    return {
        name: f"reference/{page.name}#{module}.{name}"
        for page in sorted(folder.glob("*.md"))
        for module, names in pattern.findall(page.read_text())
        for name in re.findall(r"\b[A-Z]\w+", names)
    }


LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
}
"""What makes a browser ask a host before anything is clicked."""


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        key = LOADS.get(tag, "")
        if key in values and values.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.loaded.append(values[key])
            self.links.append(values[key])


def check_site(site: Path) -> list[str]:
    """Problems of the built pages: links and anchors that lead nowhere, files from other hosts."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    pages.pop(site / "404.html", None)  # its links start at the root of the host
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        problems += [
            f"{name} loads {url} from another host" for url in page.loaded if urlsplit(url).netloc
        ]
        for url in dict.fromkeys(page.links):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                problems.append(f"{name} links to {url}, which is not there")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{name} links to {url}, whose anchor is not there")
    for path in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import)\s*['\"]?(https?:)?//", path.read_text()):
            problems.append(f"{path.relative_to(site)} loads a file from another host: {url}")
    return problems
