"""UserError, the exception for mistakes of a user, and helpers for its messages."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 60  # characters of a value in a message


class UserError(Exception):
    """A mistake in a user's input. The message is one sentence: what is wrong, and what to do about it. Characters that
    cannot be printed, line breaks among them, are written as escapes."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


class WorkerError(RuntimeError):
    """A process that carries out runs failed, and not by a mistake in a user's input. The message is one sentence;
    `details` are the traceback of the process, if there is one."""

    def __init__(self, sentence: str, details: str = "") -> None:
        super().__init__(printable(sentence))
        self.details = details


def printable(text: str) -> str:
    """The text with escapes such as \\n in place of characters that cannot be printed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "did you mean 'x'?" for a similar one, else the list of all."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}." if names else "there are none."


def unknown(kind: str, word: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not known; `kind` is what it should name, such as "model"."""
    return UserError(f"Unknown {kind} '{shown(word)}'; {nearest(str(word), known)}")


def shown(value: object) -> str:
    """A value as a message shows it: a long one is cut."""
    try:
        text = str(value)
    except ValueError:  # Python does not write integers with more than 4300 digits
        text = f"{type(value).__name__} too long to show"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def check_path(path: str | Path) -> None:
    """Raise UserError for a path that no file can have."""
    if not is_plain_text(str(path)):
        raise UserError(f"{str(path)!a} is not a path, because it has a character that is not text; give another one.")


def is_plain_text(text: str) -> bool:
    """True if a text can be part of a path and of a UTF-8 file: it has no NUL and no lone surrogates, as which Python
    reads arguments that are not UTF-8."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


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


def system_error(error: OSError) -> str:
    """The sentence for an error of the operating system that nothing else has explained."""
    if error.filename is None:
        return f"The output could not be written ({reason(error)}); send it elsewhere, or free some space."
    return f"{error.filename} cannot be used ({reason(error)}); give another path."


def _write_failure(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"The disk is full: {path} could not be written; free some space and continue."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} cannot be written (no permission); choose another folder."
    return f"{path} could not be written ({reason(error)})."


def reason(error: BaseException) -> str:
    """The message of an exception, as a part of a sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".").lower()
