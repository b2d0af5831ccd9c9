# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings, and the only reader of the environment: field ``x`` is the variable ``FERRODIST_X``."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from ferrodist.errors import InvalidArgument

DEFAULT_COLLECTIVE_TIMEOUT = 60.0


class Default(enum.Enum):
    """The type of DEFAULT, which stands for the backend's own timeout."""

    DEFAULT = "backend.timeout"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = Default.DEFAULT
Timeout = float | timedelta | None | Default


def _positive(text: str) -> float:
    return _require(float(text) > 0, float(text))


def _seconds(text: str) -> float | None:
    return None if text.lower() == "none" else _positive(text)


def _nbytes(text: str) -> int:
    return int(_require(int(text) >= 4096, int(text)))


def _flag(text: str) -> bool:
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
        "": False,
    }
    return words[text.lower()]


def _link(text: str) -> tuple[float, float, float, float]:
    latency, per_byte, per_folded_byte, overhead = (_positive(word) for word in text.split(","))
    return latency, per_byte, per_folded_byte, overhead


def _require(fits: bool, value: float) -> float:
    if not fits:
        raise ValueError(value)
    return value


def _setting(default: Any, parse: Callable[[str], Any], form: str, what: str) -> Any:
    return field(default=default, metadata={"parse": parse, "form": form, "what": what})


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting with its default. The table in the docs is made from this class."""

    timeout: float | None = _setting(
        DEFAULT_COLLECTIVE_TIMEOUT,
        _seconds,
        "seconds > 0, or none",
        "deadline of a whole call when none is passed",
    )
    reproducible: bool = _setting(
        False, _flag, "0 or 1", "fold in rank order on every backend, whatever the algorithm"
    )
    notice: float = _setting(
        5.0,
        _positive,
        "seconds > 0",
        "a wait longer than this is logged with the ranks it waits for",
    )
    piece_nbytes: int = _setting(
        1 << 20,
        _nbytes,
        "bytes >= 4096",
        "largest message a collective sends; the unit of pipelining",
    )
    segment_nbytes: int = _setting(
        1 << 22,
        _nbytes,
        "bytes >= 4096",
        "largest part of an array reduced at once; bounds the scratch memory",
    )
    fuse_nbytes: int = _setting(
        1 << 16,
        _nbytes,
        "bytes >= 4096",
        "leaves of a tree up to this size travel in one message per dtype",
    )
    threads_link: tuple[float, float, float, float] = _setting(
        (2e-5, 2e-10, 1e-10, 2e-5),
        _link,
        "four numbers > 0, by commas",
        "cost of a link between threads: latency (s), s per byte, s per folded byte, s per message",
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read every ``FERRODIST_<FIELD>`` that is set."""
        environ = os.environ if environ is None else environ
        given = {}
        for setting in fields(cls):
            name = variable(setting.name)
            if name in environ:
                given[setting.name] = _parse(name, environ[name], setting.metadata)
        return cls(**given)


def variable(setting: str) -> str:
    """Name the environment variable of a setting."""
    return f"FERRODIST_{setting.upper()}"


def _parse(name: str, text: str, metadata: Mapping[str, Any]) -> Any:
    try:
        return metadata["parse"](text.strip())
    except (ValueError, KeyError) as error:
        raise InvalidArgument(f"{name}={text!r}: expected {metadata['form']}", got=text) from error


def check_timeout(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, None for no limit; refuse what is not a time above zero."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InvalidArgument(
            f"timeout must be seconds above zero, a timedelta or None, got {timeout!r}", got=timeout
        )
    return None if seconds == float("inf") else float(seconds)
