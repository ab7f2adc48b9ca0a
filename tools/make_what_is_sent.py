"""Writes the table of docs/what-is-sent.md from what the methods declare.

python tools/make_what_is_sent.py
"""

from pathlib import Path

from fedloom.core.algorithm import ALGORITHMS

PAGE = Path(__file__).parents[1] / "docs" / "what-is-sent.md"
HEAD = "| method | a site sends | a site receives | stays at the site | with differential privacy |"


def table() -> list[str]:
    """The lines of the table."""
    rows = [HEAD, "|---|---|---|---|---|"]
    for name in ALGORITHMS.names():
        method = ALGORITHMS[name]
        if not method.__module__.startswith("fedloom."):  # of another package
            continue
        sent = "; ".join(f"`{key}`: {meaning}" for key, meaning in method.uploads.items()) or "nothing"
        private = (
            f"refused: {method.no_privacy}" if method.no_privacy else "yes" if method.uploads else "nothing is sent"
        )
        rows.append(f"| [{name}](methods/{name}.md) | {sent} | {method.shared} | {method.private} | {private} |")
    return rows


def page() -> str:
    """The page, which ends with the table."""
    return PAGE.read_text().partition(HEAD)[0] + "\n".join(table()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
