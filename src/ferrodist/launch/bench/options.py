# SPDX-License-Identifier: MIT OR Apache-2.0
"""Options that are lists, such as ``--sizes 8,64KB,1MB``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import click

from ferrodist.launch.bench.plan import KB, MB

_UNITS = {"": 1, "k": KB, "m": MB}
_LEAST_SIZE = 8


def parse_ranks(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read numbers of ranks; one rank has nobody to talk to."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise click.BadParameter(f"{text!r} must be numbers of 2 or more, such as 2,4")
    return [int(word) for word in words]


def parse_sizes(
    context: click.Context, option: click.Parameter, text: str | None
) -> list[int] | None:
    """Read sizes in bytes."""
    return None if text is None else [_parse_size(word.strip()) for word in text.split(",")]


def _parse_size(word: str) -> int:
    match = re.fullmatch(r"(\d+) ?([km]?)b?", word.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < _LEAST_SIZE:
        raise click.BadParameter(f"{word!r} must be a size of 8 bytes or more, such as 64KB")
    return size


def parse_names(
    known: Iterable[str],
) -> Callable[[click.Context, click.Parameter, str | None], list[str]]:
    """Return what reads a list of known names; no list means all of them."""

    def parse(context: click.Context, option: click.Parameter, text: str | None) -> list[str]:
        names = list(known) if text is None else [word.strip() for word in text.split(",")]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse
