# SPDX-License-Identifier: MIT OR Apache-2.0
"""Diagnostics: what all checks are given, what they return, how they are run and shown.

A check takes a ``CheckContext`` and yields diagnostics. It changes nothing on the machine, waits
for nothing without a limit, and says of everything that is wrong what to do. Files under /proc and
/sys are read below ``context.root`` and variables from ``context.environ``, so that a test can make
any machine up.
"""

from __future__ import annotations

import enum
import importlib.metadata
import itertools
import json
import logging
import platform
import socket
import textwrap
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from rich.console import Console
from rich.markup import escape

from ferrodist.config import Config, environment, read_setting, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument
from ferrodist.launch.machine import describe_machine
from ferrodist.rendezvous.job import Endpoint
from ferrodist.version import __version__

P = ParamSpec("P")
T = TypeVar("T")

_LIMIT = 40.0  # more than the slowest check allows itself
_PACKAGES = ("numpy", "msgpack", "cloudpickle", "torch", "jax", "mpi4py", "cryptography")
_INDENT = "    "


class Level(enum.StrEnum):
    """How bad a diagnostic is: only an error keeps ranks from running."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Diagnostic(NamedTuple):
    """What a check has found; ``advice`` is empty where nothing has to be done."""

    check: str  # which one; empty until ``named``
    level: Level
    what: str
    advice: str = ""


def ok(what: str) -> Diagnostic:
    return Diagnostic("", Level.OK, what)


def note(what: str, advice: str = "") -> Diagnostic:
    return Diagnostic("", Level.NOTE, what, advice)


def warn(what: str, advice: str) -> Diagnostic:
    """Say that ranks run, but slower or less safely than they could, or only some of them."""
    return Diagnostic("", Level.WARNING, what, advice)


def fail(what: str, advice: str) -> Diagnostic:
    return Diagnostic("", Level.ERROR, what, advice)


def named(check: str, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Say which check has found them."""
    return [one._replace(check=check) for one in diagnostics]


@dataclass(frozen=True, slots=True)
class CheckContext:
    """A machine, and what is to run on it.

    ``endpoint`` is where rank 0 listens, ``peer`` another host that is to be reached; ``root`` is
    where /proc, /sys and the like are found.
    """

    num_ranks: int = 1
    endpoint: Endpoint | None = None
    peer: Endpoint | None = None
    environ: Mapping[str, str] = field(default_factory=environment)
    root: Path = Path("/")

    @property
    def towards(self) -> str | None:
        """The host that the others are to be reached through; None if only this one counts."""
        other = self.peer or self.endpoint
        return None if other is None else other.host

    @property
    def config(self) -> Config:
        """The settings; those that cannot be read have their defaults.

        What is wrong with these is said by the check of the environment, once.
        """
        values = {}
        for name in (one.name for one in fields(Config) if variable(one.name) in self.environ):
            with suppress(InvalidArgument):
                values[name] = read_setting(name, self.environ)
        return Config(**values)

    def try_read(self, path: str) -> str | None:
        return try_read(self.root / path)


def try_read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def try_number(path: Path) -> int | None:
    """Read the number in a small file; None if there is none, as in "max"."""
    text = try_read(path) or ""
    return int(text) if text.isascii() and text.isdigit() else None


class LogCollector(logging.Handler):
    """Collects what the library logs on one thread, this one by default, instead of showing it."""

    def __init__(self, thread: threading.Thread | None = None) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._thread = thread or threading.current_thread()

    def __enter__(self) -> Self:
        logger = logging.getLogger("ferrodist")
        self._before = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("ferrodist")
        logger.removeHandler(self)
        logger.setLevel(self._before[0])
        logger.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread.ident:
            self.records.append(record)

    @property
    def warnings(self) -> list[str]:
        return [one.getMessage() for one in self.records if one.levelno >= logging.WARNING]


Check = Callable[[CheckContext], Iterable[Diagnostic]]


def run_checks(
    context: CheckContext, checks: Mapping[str, Check], limit: float = _LIMIT
) -> list[Diagnostic]:
    """Run all checks side by side; whatever becomes of one, the others are done."""
    deadline = Deadline(limit)
    found: dict[str, list[Diagnostic]] = {name: [] for name in checks}

    def collect(name: str, check: Check) -> None:
        for diagnostic in check(context):
            found[name].append(diagnostic)  # one by one: what was found before a crash counts

    running = {name: start(collect, name, check) for name, check in checks.items()}
    result = []
    for name, end in running.items():
        unforeseen = list(_unforeseen_end(end, deadline))  # waits
        result += named(name, [*found[name], *unforeseen])
    return result


def _unforeseen_end(end: Future[None], deadline: Deadline) -> Iterator[Diagnostic]:
    try:
        error = end.exception(max(0.0, deadline.remaining()))
    except TimeoutError:
        yield fail(
            f"this check did not end within {deadline}",
            "something that it reads hangs: look at network file systems and name servers",
        )
        return
    if error is not None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        yield fail(
            f"this check failed: {type(error).__name__}: {error} (at {where})",
            "please report it; the other checks do not depend on it",
        )


def start(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
    """Call a function on a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:  # noqa: BLE001 - the top of a thread: result() raises it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


_MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
_ASCII_MARKS = {Level.OK: "+", Level.NOTE: "-", Level.WARNING: "!", Level.ERROR: "x"}
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def show_diagnostics(console: Console, diagnostics: Sequence[Diagnostic]) -> None:
    for name, group in itertools.groupby(diagnostics, key=lambda diagnostic: diagnostic.check):
        console.print(f"[bold]{escape(name)}[/]")
        for diagnostic in group:
            _show(console, diagnostic)
    console.print(f"doctor: {count(diagnostics)}", style=_STYLES[worst(diagnostics)])


def _show(console: Console, diagnostic: Diagnostic) -> None:
    marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
    style = _STYLES[diagnostic.level]
    word = f"{diagnostic.level}: " if diagnostic.level in (Level.WARNING, Level.ERROR) else ""
    first, *others = _wrapped(console, word + diagnostic.what)
    console.print(f"  [{style}]{marks[diagnostic.level]}[/] {escape(first)}", soft_wrap=True)
    for line in others:
        console.print(f"{_INDENT}{escape(line)}", soft_wrap=True)
    if diagnostic.advice:
        for line in _wrapped(console, diagnostic.advice):
            console.print(f"{_INDENT}[dim]{escape(line)}[/]", soft_wrap=True)


def _wrapped(console: Console, text: str) -> list[str]:
    """Break a text into lines on a terminal; a log keeps them whole, for those who search it."""
    lines = text.splitlines() or [""]
    if not console.is_terminal:
        return lines
    width = max(20, console.width - len(_INDENT))
    breaking = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in breaking.wrap(line) or [""]]


def worst(diagnostics: Sequence[Diagnostic]) -> Level:
    return max(
        (diagnostic.level for diagnostic in diagnostics), key=list(Level).index, default=Level.OK
    )


def count(diagnostics: Sequence[Diagnostic]) -> str:
    numbers = Counter(diagnostic.level for diagnostic in diagnostics)
    return ", ".join(
        f"{numbers[level] or 'no'} {level}{'s' if numbers[level] > 1 else ''}"
        for level in (Level.WARNING, Level.ERROR)
    )


def to_json(diagnostics: Sequence[Diagnostic], peers: Sequence[Mapping[str, Any]]) -> str:
    numbers = Counter(diagnostic.level for diagnostic in diagnostics)
    document = {
        "machine": {"host": socket.gethostname(), **describe_machine()},
        "versions": dict(_versions()),
        "findings": [one._asdict() for one in diagnostics],
        "between_hosts": peers[0] if peers else None,
        "peers": peers,
        "warnings": numbers[Level.WARNING],
        "errors": numbers[Level.ERROR],
    }
    return json.dumps(document, indent=1)


def _versions() -> Iterator[tuple[str, str | None]]:
    yield "ferrodist", __version__
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None
