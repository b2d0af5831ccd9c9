# SPDX-License-Identifier: MIT OR Apache-2.0
"""Report: what a run of the contract found on one rank, as plain data."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from ferrodist.testing.contract.case import Case

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed, and in which way; ``run_contract(backend, [case])`` runs it alone."""

    case: Case
    text: str

    def __str__(self) -> str:
        return f"{self.case}\n{textwrap.indent(self.text, '    ')}"


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found; printing it tells how to run what failed again."""

    world: int
    rank: int
    seed: int
    num_cases: int
    libraries: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    stopped: str | None = None  # why the run came to an early end

    @property
    def is_clean(self) -> bool:
        """True if every case was run and none failed."""
        return not self.failures and self.stopped is None

    def __str__(self) -> str:
        failed = f"{len(self.failures)} failed" if self.failures else "none failed"
        lines = [
            f"contract on rank {self.rank} of {self.world}: {self.num_cases} cases, {failed}; "
            f"seed {self.seed}, arrays of {', '.join(self.libraries)}"
        ]
        if self.stopped is not None:
            lines.append(f"stopped early: {self.stopped}")
        lines += [str(failure) for failure in self.failures[:_SHOWN]]
        if len(self.failures) > _SHOWN:
            lines.append(f"... and {len(self.failures) - _SHOWN} more")
        if self.failures:
            lines.append("run one alone, on every rank: run_contract(backend, [Case(...)])")
        return "\n".join(lines)
