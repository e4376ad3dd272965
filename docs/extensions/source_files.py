"""Links to files outside docs/: to their page if the site has one, or to the code, highlighted."""

import os
import re
from html import escape
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Pages of the repository that a page of the site includes.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
STYLES = ("a11y-high-contrast-light", "a11y-high-contrast-dark")
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def rewrite(text: str, folder: Path) -> str:
    """Return a page, which is in `folder`, with its links as the site needs them."""

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if not path.is_relative_to(ROOT) or path.suffix in (".png", ".svg"):
            return match[0]
        if (path / "README.md").is_file():
            path /= "README.md"
        if path.is_relative_to(DOCS):
            page = path.relative_to(DOCS).as_posix()
        else:
            page = PAGES.get(path.relative_to(ROOT).as_posix())
        if page is None:
            return f"source:{path.relative_to(ROOT).as_posix()}"
        return f"/{page}{match[2] or ''}"

    return LINK.sub(target, text)


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite the links of a page."""
    folder = Path(app.env.doc2path(docname)).parent
    content[0] = rewrite(content[0], folder)


def read_included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Rewrite the links of a file that a page includes."""
    content[0] = rewrite(content[0], (app.srcdir / path).resolve().parent)


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn links to files into links to their pages; links to folders become text."""
    for link in list(doctree.findall(nodes.reference)):
        uri = link.get("refuri", "")
        path = uri.removeprefix("source:")
        if path == uri:
            continue
        if (ROOT / path).is_file() and app.builder.format == "html":
            link["refuri"] = f"{'../' * docname.count('/')}files/{path}.html"
            write_page(app, path)
        else:
            link.replace_self(link.children)


def write_page(app: Sphinx, path: str) -> None:
    """Write the page of a file, once. It is no page of the theme, which would take much longer."""
    page = app.outdir / "files" / f"{path}.html"
    source = ROOT / path
    if page.exists() and page.stat().st_mtime > source.stat().st_mtime:
        return
    lexer = get_lexer_for_filename(path, stripnl=False)
    styles = [HtmlFormatter(style=name).get_style_defs(".highlight") for name in STYLES]
    code = highlight(source.read_text(), lexer, HtmlFormatter(linenos="inline", lineanchors="L"))
    home = "../" * (path.count("/") + 1)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(path)}</title>
<style>{styles[0]} @media (prefers-color-scheme: dark) {{ {styles[1]} }}
:root {{ color-scheme: light dark; }} body {{ font-family: sans-serif; margin: 1rem; }}
.highlight {{ background: none; overflow-x: auto; }} .linenos {{ user-select: none; }}</style>
<p><a href="{home}index.html">{escape(app.config.html_title)}</a> · <code>{escape(path)}</code></p>
{code}</html>
"""
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.config.myst_url_schemes = dict.fromkeys(("http", "https", "mailto", "source"))
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("doctree-resolved", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
