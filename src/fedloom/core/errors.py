"""The one exception that is meant for the person at the keyboard."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def oserror_as_user_error(path: Path) -> Iterator[None]:
    """Turn an OSError about writing this path into a UserError that says why it could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(_refusal(error, path)) from error


def _refusal(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk is full: {path} could not be written; free some space and continue."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} cannot be written (no permission); choose another folder."
    reason = (error.strerror or str(error) or type(error).__name__).splitlines()[0].rstrip(".").lower()
    return f"{path} could not be written ({reason})."
