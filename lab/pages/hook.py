"""Hooks of mkdocs: the pages keep links that work in the repository, and the site gets its own.

A link to a file outside of docs/ becomes that file's name, since the site does not have it.
CONTRIBUTING.md and SECURITY.md are pages of the site; ``docs/checks`` is ``health/pages``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lab.pages.markup import slug

TOP = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
# A search shows messages, settings and options before the decisions about them.
BOOST = {"messages.md": 4, "settings.md": 3, "commands.md": 2, "decisions": 0.3, "bench.md": 0.3}
# A block of code, a link, or code within a line: only a link that is in no code is changed.
_LINK = re.compile(
    r"```.*?```|(?<!!)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)|`[^`\n]*`", re.DOTALL
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of a folder where the nav names the folder: ``checks/``."""
    config.mdx_configs["toc"]["slugify"] = slug
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are at the top of the repository."""
    top = Path(config.config_file_path or "").parent
    for name, page in TOP.items():
        text = (top / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, "", page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's pages, name the files that it does not have, and rank the page."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {"boost": BOOST.get(uri.partition("/")[0], 1)})
    return markdown if uri in TOP.values() else relinked(markdown, f"docs/{uri}", uri)


def relinked(text: str, written: str, page: str) -> str:
    """Return the page's text with links of the site.

    ``written``: the text's path in the repository, to which its links are relative; ``page``: its
    page on the site.
    """
    real = re.sub(r"^docs/checks/", "health/pages/", written)

    def link(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        target, hash_, fragment = match["target"].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        found = _page(posixpath.normpath(posixpath.join(posixpath.dirname(real), target)))
        if found is None and real != written:
            found = _page(posixpath.normpath(posixpath.join(posixpath.dirname(written), target)))
        if found is None:
            name = match["text"].strip("`")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(real), target))
            return (
                f"`{path}`"
                if name in (path, posixpath.basename(path))
                else f"{match['text']} (`{path}`)"
            )
        start = posixpath.dirname(page) or "."
        return f"[{match['text']}]({posixpath.relpath(found, start)}{hash_}{fragment})"

    return _LINK.sub(link, text)


def _page(path: str) -> str | None:
    """Return the site's page, or file, for a path in the repository; None: the site has none."""
    if path in TOP:
        return TOP[path]
    if path == "README.md":
        return "index.md"
    if path.startswith("health/pages/"):
        return path.replace("health/pages/", "checks/", 1)
    inside = path.removeprefix("docs/")
    return inside if path != inside else None


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, list):
        return [_expanded(each, docs) for each in nav]
    if isinstance(nav, dict):
        return {title: _expanded(below, docs) for title, below in nav.items()}
    if isinstance(nav, str) and nav.endswith("/"):
        names = sorted(path.name for path in (docs / nav).glob("*.md"))
        names.sort(key=lambda name: name != "README.md")
        return [nav + name for name in names]
    return nav
