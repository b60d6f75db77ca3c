"""Markup of the documentation: fence attributes for the tests are removed, figures are inlined."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

#: The attributes of a fenced block that tests/docs/test_docs.py reads: ```sh {.no-run reason="..."}
ATTRIBUTES = re.compile(r"^(\s*`{3,}\w+)(?: title=(\"[^\"]*\"))? \{[^}\n]*\}$", re.M)
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^":]+\.svg)"\s*/?>')
DARK = "@media(prefers-color-scheme:dark)"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove the attributes for the tests, which the site does not show."""

    def plain(match: re.Match[str]) -> str:
        return match[1] + (f" title={match[2]}" if match[2] else "")

    return ATTRIBUTES.sub(plain, markdown)


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Replace SVG images by their content, so that they follow the page's colours."""
    number = 0

    def inlined(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        folder = posixpath.dirname(page.file.dest_uri)
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        svg = Path(config.docs_dir, target).read_text()
        if DARK not in svg:  # a plot, which is readable on both backgrounds
            return match[0]
        name = f"figure-{number}"
        return f'<figure class="drawn" id="{name}">{scoped(svg, name)}</figure>'

    return IMAGE.sub(inlined, html)


def scoped(svg: str, name: str) -> str:
    """`svg` with a style that applies to the element `name` only, and whose dark colours are those
    of the page's dark scheme."""
    svg = re.sub(r"<\?xml.*?\?>\s*", "", svg)
    start, style, end = re.match(r"(?s)(.*?)<style>(.*?)</style>(.*)", svg).groups()
    light, _, dark = style.partition(DARK)
    dark = dark.strip().removeprefix("{").removesuffix("}")
    rules = f"#{name}{{{light}}}[data-md-color-scheme=slate] #{name}{{{dark}}}"
    return f"{start}<style>{rules}</style>{end}"
