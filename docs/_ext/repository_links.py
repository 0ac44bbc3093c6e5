"""Links of Markdown pages to files outside docs/ become links to pages where there is one, and plain text elsewhere.

README, CHANGELOG and CONTRIBUTING are included from the root, and pages name source files: `../spec_v2/engine.py`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)")
ANCHOR = re.compile(
    r'^<a id="([\w-]+)"></a>\n\n(?=#)', re.MULTILINE
)  # before a heading; Sphinx has a form of its own
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def rewritten(text: str, folder: str, page_folder: str) -> str:
    """`text`, which was written for `folder`, with its links as a page in `page_folder` needs them; both relative to the root."""

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, hash_mark, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        whole = posixpath.normpath(posixpath.join(folder, path))
        whole = f"docs/{PAGES[whole]}" if whole in PAGES else whole
        whole = f"docs/{whole}" if whole.startswith("notebooks/") and whole.endswith(".ipynb") else whole
        if whole.startswith("docs/") and whole.endswith((".md", ".ipynb")):
            return f"[{words}]({posixpath.relpath(whole, page_folder)}{hash_mark}{anchor})"
        if whole.startswith("docs/") and (ROOT / whole).is_file():
            return (
                match[0] if folder == page_folder else f"[{words}]({posixpath.relpath(whole, page_folder)})"
            )
        return words if "`" in words else f"{words} (`{whole}`)" if words != whole else f"`{whole}`"

    return LINK.sub(link, text)


def _rewrite(app: Any, docname: str, source: list[str]) -> None:
    if not str(app.env.doc2path(docname)).endswith(".md"):
        return
    folder = posixpath.normpath(posixpath.join("docs", posixpath.dirname(docname)))
    source[0] = ANCHOR.sub(r"(\1)=\n", rewritten(source[0], folder, folder))


def _rewrite_included(app: Any, relative_path: Path, parent: str, content: list[str]) -> None:
    page = posixpath.normpath(posixpath.join("docs", posixpath.dirname(parent)))
    folder = posixpath.dirname(posixpath.normpath(posixpath.join("docs", relative_path.as_posix()))) or "."
    content[0] = rewritten(content[0], folder, page)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _rewrite)
    app.connect("include-read", _rewrite_included)
    return {"parallel_read_safe": True}
