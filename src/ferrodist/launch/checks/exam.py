# SPDX-License-Identifier: MIT OR Apache-2.0
"""The whole exam: all checks at once, each for itself, their findings in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from ferrodist.deadline import Deadline
from ferrodist.launch.checks import (
    clock,
    cores,
    engines,
    files,
    interfaces,
    kernel,
    memory,
    names,
    ports,
    variables,
)
from ferrodist.launch.checks.background import start
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation

Check = Callable[[Situation], Iterable[Finding]]

CHECKS: Mapping[str, Check] = {
    "environment": variables.check,
    "interfaces": interfaces.check,
    "names": names.check,
    "ports": ports.check,
    "cores": cores.check,
    "memory": memory.check,
    "files and processes": files.check,
    "kernel": kernel.check,
    "clock": clock.check,
    "engines": engines.check,
}
_LIMIT = 40.0  # more than the slowest check allows itself


def examine(
    situation: Situation, checks: Mapping[str, Check] = CHECKS, limit: float = _LIMIT
) -> list[Finding]:
    """Run all checks side by side; whatever becomes of one, the others are done."""
    deadline = Deadline(limit)
    running = {name: _Running(name, check, situation) for name, check in checks.items()}
    return [finding for one in running.values() for finding in one.findings(deadline)]


class _Running:
    """A check on its way, and what it has found so far."""

    def __init__(self, name: str, check: Check, situation: Situation) -> None:
        self._about = Subject(name)
        self._found: list[Finding] = []
        self._end: Future[None] = start(self._collect, check, situation)

    def _collect(self, check: Check, situation: Situation) -> None:
        for finding in check(situation):
            self._found.append(finding)  # one by one: what was found before a crash counts

    def findings(self, deadline: Deadline) -> list[Finding]:
        """Wait for the check; an end that was not foreseen is a finding, too."""
        limit = max(0.0, deadline.remaining())
        try:
            error = self._end.exception(limit)
        except TimeoutError:
            return [*self._found, self._late(deadline)]
        return [*self._found, *([] if error is None else [self._crash(error)])]

    def _late(self, deadline: Deadline) -> Finding:
        return self._about.error(
            f"this check did not end within {deadline}",
            "something that it reads hangs: look at network file systems and name servers",
        )

    def _crash(self, error: BaseException) -> Finding:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return self._about.error(
            f"this check failed: {type(error).__name__}: {error} (at {where})",
            "please report it; the other checks do not depend on it",
        )
