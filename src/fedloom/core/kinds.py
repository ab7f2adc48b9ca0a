"""The kinds of targets, by name."""

from typing import Literal

Kind = Literal["classes", "labels", "number"]  # one class per sample, any number of labels, or a number
KINDS: tuple[Kind, ...] = ("classes", "labels", "number")
