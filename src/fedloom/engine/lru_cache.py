"""A least-recently-used cache of tensors, bounded in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fedloom.core.tree import size_bytes

KEY_BYTES = 1 << 10  # what an entry takes besides its tensors, roughly
T = TypeVar("T")


class LRUCache(Generic[T]):
    """Trees of tensors by key; the least recently used ones are dropped when the cache is full."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.entries: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The entry of a key, made if it is not there."""
        if key in self.entries:
            self.entries.move_to_end(key)
            return self.entries[key]
        self.entries[key] = value = make()
        self.bytes += KEY_BYTES + size_bytes(value)
        while self.bytes > self.max_bytes:
            self.bytes -= KEY_BYTES + size_bytes(self.entries.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        self.entries.clear()
        self.bytes = 0
