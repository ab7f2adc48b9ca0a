"""UserError, the exception for mistakes of a user, and helpers for its messages."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake in a user's input. The message is one sentence: what is wrong, and what to do about it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "did you mean 'x'?" for a similar one, else the list of all."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}." if names else "there are none."


def unknown(kind: str, word: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not known; `kind` is what it should name, such as "model"."""
    return UserError(f"Unknown {kind} '{word}'; {nearest(str(word), known)}")


@contextmanager
def oserror_as_user_error(path: Path) -> Iterator[None]:
    """Context in which an OSError about writing this path becomes a UserError that says why it failed."""
    try:
        yield
    except OSError as error:
        raise UserError(_write_failure(error, path)) from error


def plural(count: int, noun: str) -> str:
    """A count and its noun: "1 client", "2 clients"."""
    return f"{count} {noun}" + "s" * (count != 1)


def _write_failure(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk is full: {path} could not be written; free some space and continue."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} cannot be written (no permission); choose another folder."
    reason = (error.strerror or str(error) or type(error).__name__).splitlines()[0].rstrip(".").lower()
    return f"{path} could not be written ({reason})."
