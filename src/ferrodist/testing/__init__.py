# SPDX-License-Identifier: MIT OR Apache-2.0
"""For tests of distributed code, yours and ours: ranks as threads, faults, the contract suite.

Public: everything here keeps working from release to release.
"""

from __future__ import annotations

from ferrodist.testing.contract import (
    Case,
    Failure,
    Report,
    contract_cases,
    distinct_values,
    run_contract,
)
from ferrodist.testing.ranks import run_ranks
from ferrodist.transports.faulty import Fate, Faults

__all__ = [
    "run_ranks",
    # faults
    "Faults",
    "Fate",
    # the backend contract
    "Case",
    "Failure",
    "Report",
    "contract_cases",
    "distinct_values",
    "run_contract",
]
