"""What every message to a user has in common."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedloom.core.errors import UserError


@contextmanager
def user_error(*words: str) -> Iterator[None]:
    """The block raises a UserError: one sentence, with the given words in it."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, message
    assert message.endswith((".", "?")), message
    assert not re.search(r"[.?!]\s+[A-Z]", message), message
    for word in words:
        assert word in message, message
