# SPDX-License-Identifier: MIT OR Apache-2.0
"""who_listens: which process has a port, as far as /proc shows it to this user."""

from __future__ import annotations

import os
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"


def who_listens(port: int) -> str | None:
    """Name the process that listens at a port: pid and command; None if it is not to be seen."""
    sockets = {f"socket:[{inode}]" for table in _TABLES for inode in _listeners(table, port)}
    if not sockets:
        return None
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _has_one_of(process, sockets):
            return f"pid {process.name} ({_command(process)})"
    return None


def _listeners(table: str, port: int) -> list[str]:
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return []
    fields = [line.split() for line in lines]
    ending = f":{port:04X}"
    return [one[9] for one in fields if one[3] == _LISTENS and one[1].endswith(ending)]


def _has_one_of(process: Path, sockets: set[str]) -> bool:
    try:
        files = os.listdir(process / "fd")
    except OSError:
        return False  # another user's, or gone
    for file in files:
        try:
            if os.readlink(process / "fd" / file) in sockets:
                return True
        except OSError:
            continue
    return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = b" ".join(words).decode(errors="replace").strip()
    return text if len(text) <= 80 else f"{text[:80]}..."
