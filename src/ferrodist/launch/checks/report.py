# SPDX-License-Identifier: MIT OR Apache-2.0
"""Show findings: as a list on a terminal or in a log, or as JSON."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
import socket
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from ferrodist.launch.bench.machine import describe_machine
from ferrodist.launch.checks.finding import Finding, Level
from ferrodist.launch.checks.peer_measure import Measured
from ferrodist.version import __version__

_MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.ERROR: "✗"}
_ASCII_MARKS = {Level.OK: "+", Level.NOTE: "-", Level.WARNING: "!", Level.ERROR: "x"}
_STYLES = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.ERROR: "bold red",
}
_PACKAGES = ("numpy", "msgpack", "cloudpickle", "torch", "jax", "mpi4py", "cryptography")
_INDENT = "    "


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print all findings by check, and how many are bad."""
    for name, group in itertools.groupby(findings, key=lambda finding: finding.check):
        console.print(f"[bold]{escape(name)}[/]")
        for finding in group:
            _show(console, finding)
    console.print(f"doctor: {count(findings)}", style=_STYLES[worst(findings)])


def _show(console: Console, finding: Finding) -> None:
    marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
    style = _STYLES[finding.level]
    word = f"{finding.level}: " if finding.level in (Level.WARNING, Level.ERROR) else ""
    first, *others = _wrapped(console, word + finding.what)
    console.print(f"  [{style}]{marks[finding.level]}[/] {escape(first)}", soft_wrap=True)
    for line in others:
        console.print(f"{_INDENT}{escape(line)}", soft_wrap=True)
    if finding.advice:
        for line in _wrapped(console, finding.advice):
            console.print(f"{_INDENT}[dim]{escape(line)}[/]", soft_wrap=True)


def _wrapped(console: Console, text: str) -> list[str]:
    """Break a text into lines on a terminal; a log keeps them whole, for those who search it."""
    lines = text.splitlines() or [""]
    if not console.is_terminal:
        return lines
    width = max(20, console.width - len(_INDENT))
    breaking = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in breaking.wrap(line) or [""]]


def worst(findings: Sequence[Finding]) -> Level:
    """Return how bad the worst finding is."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def count(findings: Sequence[Finding]) -> str:
    """Say how many warnings and errors there are."""
    numbers = Counter(finding.level for finding in findings)
    return ", ".join(_plural(numbers[level], level) for level in (Level.WARNING, Level.ERROR))


def _plural(number: int, level: Level) -> str:
    if number == 0:
        return f"no {level}"
    return f"1 {level}" if number == 1 else f"{number} {level}s"


def to_json(findings: Sequence[Finding], measured: Measured | None) -> str:
    """Return everything as one JSON object."""
    numbers = Counter(finding.level for finding in findings)
    document = {
        "machine": {"host": socket.gethostname(), **describe_machine()},
        "versions": dict(_versions()),
        "findings": [finding._asdict() for finding in findings],
        "between_hosts": None if measured is None else asdict(measured),
        "warnings": numbers[Level.WARNING],
        "errors": numbers[Level.ERROR],
    }
    return json.dumps(document, indent=1)


def _versions() -> Iterator[tuple[str, str | None]]:
    """Name what is installed; nothing of it is imported."""
    yield "ferrodist", __version__
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None
