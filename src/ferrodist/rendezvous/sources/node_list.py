# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lists as SLURM writes them: hosts as ``node[01-03,7],gpu5``, numbers as ``4(x2),3``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_HOST = re.compile(r"(?:[^\[\],\s]+|\[[0-9,\-]+\])+")
_PART = re.compile(r"\[([0-9,\-]+)\]|([^\[\],\s]+)")
_TIMES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
_MOST_DIGITS = 9


def expand(text: str) -> Iterator[str]:
    """Give the hosts of a list one by one, in order; raises ValueError where it is not one."""
    position = 0
    while True:
        found = _HOST.match(text, position)
        if found is None:
            raise ValueError(f"no name of a host at letter {position}")
        yield from _hosts(found.group())
        position = found.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise ValueError(f"no comma at letter {position}")
        position += 1


def repeated(text: str) -> Iterator[int]:
    """Give the numbers of a list one by one; raises ValueError where it is not one."""
    for word in text.split(","):
        found = _TIMES.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is not a number, or one with how often")
        number, times = found.groups()
        yield from itertools.repeat(int(number), int(times or 1))


def _hosts(word: str) -> Iterator[str]:
    parts = [
        list(_numbers(numbers)) if numbers else [name] for numbers, name in _PART.findall(word)
    ]
    return map("".join, itertools.product(*parts))


def _numbers(text: str) -> Iterator[str]:
    """Give the numbers between two brackets, with the zeros that fill them up."""
    for span in text.split(","):
        first, dash, last = span.partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isdigit() and len(end) <= _MOST_DIGITS for end in ends):
            raise ValueError(f"[{text}] is not a list of numbers")
        low, high = map(int, ends)
        if high - low > 1 << 16:
            raise ValueError(f"[{text}] has too many numbers")
        yield from (f"{number:0{len(first)}}" for number in range(low, high + 1))
