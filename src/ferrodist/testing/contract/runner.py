# SPDX-License-Identifier: MIT OR Apache-2.0
"""run_contract: all cases on one group of ranks, and one report from each rank.

Ranks make no calls between cases while all is well, so that calls of every kind follow each other
at full speed. A rank on which a case raises calls *resume*, a collective no case uses. The others
meet it in whatever they are at, get a mismatch, and come to resume too; there all agree where to go
on.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import ferrodist
from ferrodist import Backend, CollectiveMismatch, DistributedError
from ferrodist.testing.contract.case import Case, Trial, describe_error
from ferrodist.testing.contract.grids import check_grid
from ferrodist.testing.contract.groups import check_group
from ferrodist.testing.contract.messages import check_message
from ferrodist.testing.contract.mismatches import check_mismatch, check_synchronised
from ferrodist.testing.contract.objects import check_empty_tree, check_object, check_tree
from ferrodist.testing.contract.reductions import check_custom, check_pair
from ferrodist.testing.contract.refusals import check_refused
from ferrodist.testing.contract.results import Check, check_result

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed, and how; ``run_contract(backend, [case])`` runs it alone."""

    case: Case
    text: str

    def __str__(self) -> str:
        return f"{self.case}\n{textwrap.indent(self.text, '    ')}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a rank's run; printing it shows failures and how to run them again."""

    world: int
    rank: int
    seed: int
    num_cases: int
    libraries: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    stopped: str | None = None  # why the run came to an early end

    @property
    def is_clean(self) -> bool:
        """Whether all cases were run and none failed."""
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


_RESUME_SHAPE = (1, 1, 1, 1, 1, 1, 1)
_RESUME_NAME = "int64[1,1,1,1,1,1,1]"  # how a mismatch shows a call of this shape
_MAX_MEETINGS = 20

_CHECKS: dict[str, Check] = {
    "result": check_result,
    "pair": check_pair,
    "custom": check_custom,
    "synchronised": check_synchronised,
    "refused": check_refused,
    "mismatch": check_mismatch,
    "message": check_message,
    "object": check_object,
    "group": check_group,
    "grid": check_grid,
}


def run_contract(backend: Backend, cases: Sequence[Case], *, timeout: float = 30.0) -> Report:
    """Run contract cases on a backend and return a report; every rank passes the same list.

    Failures do not raise: they are in the report. ``timeout`` bounds each call, in seconds. A rank
    that exceeds it ends the run early, because the group is unusable then.

    Example:
        >>> from ferrodist.testing import contract_cases, run_contract, run_ranks
        >>> cases = contract_cases(world=2)
        >>> reports = run_ranks(2, lambda backend: run_contract(backend, cases[:20]))
        >>> [report.is_clean for report in reports]
        [True, True]
    """
    before, backend.timeout = backend.timeout, timeout
    try:
        return _Run(backend, cases).finish()
    finally:
        backend.timeout = before


class _GroupGone(Exception):
    """The group cannot go on; the message says why."""


class _Run:
    """One run on one rank."""

    def __init__(self, backend: Backend, cases: Sequence[Case]) -> None:
        self._backend = backend
        self._cases = cases
        self._failures: list[Failure] = []
        self._digests = np.zeros(len(cases), np.uint64)

    def finish(self) -> Report:
        """Run everything and write the report."""
        stopped = None
        try:
            self._run_cases()
        except _GroupGone as error:
            stopped = str(error)
        seed = self._cases[0].seed if self._cases else 0
        names = sorted({name for case in self._cases for name in case.library.split("+")})
        backend, number = self._backend, len(self._cases)
        return Report(
            backend.world_size, backend.rank, seed, number, tuple(names), self._failures, stopped
        )

    def _run_cases(self) -> None:
        index, end = 0, len(self._cases)
        while index <= end:
            index = self._run_case(index) if index < end else self._compare_digests()

    def _run_case(self, index: int) -> int:
        """Run one case and return the index of the next."""
        case = self._cases[index]
        trial = Trial(self._backend, case)
        try:
            _find_check(case)(trial)
        except Exception as error:  # noqa: BLE001 -- whatever a broken backend raises is a finding
            return self._recover(index, trial, error)
        self._note(case, trial.problems)
        self._digests[index] = 0 if trial.problems else trial.digest
        return index + 1

    def _note(self, case: Case, problems: Sequence[str]) -> None:
        if problems:
            self._failures.append(Failure(case, "\n".join(problems)))

    def _recover(self, index: int, trial: Trial, error: Exception) -> int:
        # A rank that only met another one's call to resume has found nothing: it tries again.
        was_interrupted = isinstance(error, CollectiveMismatch) and _RESUME_NAME in str(error)
        if not was_interrupted:
            self._note(trial.case, [*trial.problems, f"raised {describe_error(error)}"])
        return self._resume(index if was_interrupted else index + 1)

    def _resume(self, wish: int) -> int:
        """Meet all other ranks and go on with the case furthest ahead."""
        for _ in range(_MAX_MEETINGS):
            try:
                # Others may be waiting for a message that never comes: give them time.
                wishes = ferrodist.all_gather(
                    np.full(_RESUME_SHAPE, wish), self._backend, timeout=4 * self._timeout
                )
            except CollectiveMismatch:
                continue  # a rank was still in a case
            except DistributedError as error:
                raise _GroupGone(describe_error(error)) from error
            return int(wishes.max())
        raise _GroupGone("ranks could not be brought back in step")

    @property
    def _timeout(self) -> float:
        return self._backend.timeout or 60.0

    def _compare_digests(self) -> int:
        """See that every rank held the same bits wherever results are the same for all."""
        end = len(self._cases)
        try:
            table = ferrodist.all_gather(self._digests[None], self._backend)
        except CollectiveMismatch:
            return self._resume(end)  # the last case failed on another rank
        except DistributedError as error:
            raise _GroupGone(describe_error(error)) from error
        differ = (table != table[0]).any(axis=0) & (table != 0).all(axis=0)
        for index in np.flatnonzero(differ).tolist():
            self._note(self._cases[index], ["ranks do not hold the same bits"])
        return end + 1


def _find_check(case: Case) -> Check:
    if case.style == "empty_tree":
        return check_empty_tree
    return check_tree if case.style.startswith("tree") else _CHECKS[case.check]
