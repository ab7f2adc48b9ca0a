"""What was worked out last, for those who ask for the same again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fedloom.core.tree import size_bytes

ENTRY = 1 << 10  # bytes that a key takes, about
T = TypeVar("T")


class Recent(Generic[T]):
    """Trees of tensors by key, as many of those used last as fit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        self.kept[key] = value = make()
        self.bytes += ENTRY + size_bytes(value)
        while self.bytes > self.limit:
            self.bytes -= ENTRY + size_bytes(self.kept.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        self.kept.clear()
        self.bytes = 0
