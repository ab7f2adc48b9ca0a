"""Hooks of the documentation site (`make docs`): notebooks as pages, and links to files outside `docs/`.

The pages are read on a code host, too, where `../src/fedloom/cli` leads to a folder and a notebook is shown as it is.
On the site, a notebook becomes a page of the same name. A link to a file outside `docs/` leads to the repository, if
`repo_url` in mkdocs.yml names one; otherwise the page says in text where the file is.
"""

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Links(Extension, Treeprocessor):
    """Changes links before MkDocs resolves them. Code is not a link by then."""

    page = ""  # that is converted, below docs/
    repository: str | None = None

    def extendMarkdown(self, md: Markdown) -> None:
        self.md = md
        md.treeprocessors.register(self, "fedloom links", 1)  # after attributes (8), before MkDocs resolves links (0)

    def run(self, root: ElementTree.Element) -> None:
        for link in root.iter("a"):
            target = link.get("href", "")
            if not re.match(r"[a-z]+:|#", target):
                self.change(link, target)

    def change(self, link: ElementTree.Element, target: str) -> None:
        """Let a link lead to a notebook's page, to the repository, or nowhere."""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.page), target))
        if target.endswith(".ipynb") and not link.get("download"):
            link.set("href", target.removesuffix(".ipynb") + ".md")
        elif path.startswith("../") and self.repository:
            link.set("href", f"{self.repository.rstrip('/')}/blob/HEAD/{path.removeprefix('../')}")
        elif path.startswith("../"):
            del link.attrib["href"]
            link.tag = "span"
            if (inside := path.removeprefix("../")) not in "".join(link.itertext()):
                link.tail = f" ({inside}){link.tail or ''}"


LINKS = Links()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Convert all pages with `Links`."""
    LINKS.repository = config.repo_url
    config.markdown_extensions.append(LINKS)  # type: ignore[arg-type]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remember which page is converted."""
    LINKS.page = page.file.src_uri
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
        page = notebook_page(notebook, posixpath.basename(file.src_uri))
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown: text, code, and what the code shows. Its first cell is the title."""
    title, *cells = notebook["cells"]
    parts = ["".join(title["source"]), f"[Download this notebook]({name}){{download={name}}}"]
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *(shown(output, source) for output in cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def shown(output: dict[str, Any], source: str) -> str:
    """What code shows: text in a block, or a picture, which the comment in the first line of the code describes."""
    data = output.get("data", {})
    if picture := data.get("image/png"):
        about = re.match(r"# (.+)", source)
        alt = html.escape(about[1] if about else "A figure", quote=True)
        return f'<img alt="{alt}" src="data:image/png;base64,{"".join(picture).strip()}">'
    return f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```"
