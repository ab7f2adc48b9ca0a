"""The report page: one HTML file with its data, its style and its programs, which needs no other file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = ("vendor/vega.min.js", "vendor/vega-lite.min.js", "charts.js", "page.js")


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """The page that shows `data`; a live one asks the server that it came from for newer data.

    The page's Content-Security-Policy allows no request, or a live page those to its own server. Names that come from
    users' files are put into the page as text, never as HTML.
    """
    scripts = [f"<script>\n{_text(name)}\n</script>" for name in SCRIPTS]
    parts = {
        "CONNECT": "'self'" if live else "'none'",
        "TITLE": html.escape(data["title"]),
        "STYLE": _text("style.css"),
        "DATA": as_json(data).replace("<", "\\u003c"),  # so that no text can end the element
        "SCRIPTS": "\n".join(scripts),
    }
    first, *rest = _text("page.html").split("@@")
    return first + "".join(parts[part] if i % 2 == 0 else part for i, part in enumerate(rest))


def as_json(data: Mapping[str, Any]) -> str:
    """JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _text(name: str) -> str:
    return (files("fedloom.report.page") / name).read_text(encoding="utf-8")
