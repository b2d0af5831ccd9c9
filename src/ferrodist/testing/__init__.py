# SPDX-License-Identifier: MIT OR Apache-2.0
"""For tests of distributed code, yours and ours: ranks as threads, faults, the contract suite.

Public: everything here keeps working from release to release. The contract suite, which only
authors of backends need, is imported when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ferrodist.backends.thread_faults import Faults
from ferrodist.testing.links import LinkFaults
from ferrodist.testing.proxy import FaultProxy
from ferrodist.testing.ranks import run_ranks, run_torch_ranks

if TYPE_CHECKING:
    from ferrodist.testing.contract import (
        Case,
        Failure,
        Report,
        contract_cases,
        distinct_values,
        run_contract,
    )

_CONTRACT = ["Case", "Failure", "Report", "contract_cases", "distinct_values", "run_contract"]

__all__ = [
    "run_ranks",
    "run_torch_ranks",
    # faults
    "Faults",
    "FaultProxy",
    "LinkFaults",
    # the backend contract
    "Case",
    "Failure",
    "Report",
    "contract_cases",
    "distinct_values",
    "run_contract",
]


def __getattr__(name: str) -> Any:
    if name not in _CONTRACT:
        raise AttributeError(f"module 'ferrodist.testing' has no attribute {name!r}")
    return getattr(import_module("ferrodist.testing.contract"), name)
