"""The one exception that is meant for the person at the keyboard."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what was asked for: one sentence that says what is wrong and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean 'x'?' for the closest known name, else the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}." if names else "there are none."


def unknown(kind: str, word: object, known: Iterable[str]) -> UserError:
    return UserError(f"Unknown {kind} '{word}'; {nearest(str(word), known)}")
