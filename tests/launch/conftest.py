"""What tests of launchers share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Give what writes a script; all it needs is imported, ``rank`` and ``say`` are there."""
    head = textwrap.dedent("""\
        import os, signal, sys, time
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        def say(*words):  # in one piece
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())
        """)

    def write(code: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(head + textwrap.dedent(code))
        return str(path)

    return write
