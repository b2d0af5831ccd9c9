# SPDX-License-Identifier: MIT OR Apache-2.0
"""Show how far a command is: a live bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, float], None]
"""Called with the number of steps done and the loss of the last one."""

_LINES_IN_A_LOG = 5


def open_progress(console: Console, title: str, steps: int) -> AbstractContextManager[Report]:
    """Show progress in the way that suits where the output goes."""
    return (_live if is_live(console) else _plain)(console, title, steps)


def is_live(console: Console) -> bool:
    """Tell whether a bar can move where the output goes."""
    # Asked of the file, not of rich: FORCE_COLOR must not fill a log with frames of a bar.
    return console.file.isatty() and console.is_interactive


@contextmanager
def _live(console: Console, title: str, steps: int) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, loss="-")
        yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}")


@contextmanager
def _plain(console: Console, title: str, steps: int) -> Iterator[Report]:
    every = max(1, steps // _LINES_IN_A_LOG)

    def report(step: int, loss: float) -> None:
        if step % every == 0:
            console.print(f"{title}: step {step} of {steps}, loss {loss:.3f}")

    yield report
