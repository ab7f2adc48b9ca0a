"""Sizes of memory as users write them."""

import re

from fedloom.core.errors import UserError, shown

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(name: str, text: str) -> int:
    """The number of bytes of a size such as "3GB" or "1.5 GiB", the value of the setting `name`."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]{2,3})\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise UserError(f"{name} cannot be '{shown(text)}'; write a number and a unit, such as 3GB or 800MB.")
    return int(float(found[1]) * unit)
