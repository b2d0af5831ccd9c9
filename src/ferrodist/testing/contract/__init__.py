# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend contract: what every backend must do, written once and run on each of them.

A ``Case`` is plain data. ``contract_cases`` lists what a world of some size must get right, and
``run_contract`` runs the list on one rank of a group, however the group was started, and returns a
``Report``. Expected values come from NumPy alone.

The rule of this package: a check knows the public functions and the Backend, nothing below them.
A file has one or two checks; ``cases`` says what is checked, ``values`` and
``inputs`` with what and against what.
"""

from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.cases import contract_cases
from ferrodist.testing.contract.runner import Failure, Report, run_contract
from ferrodist.testing.contract.values import distinct_values

__all__ = ["Case", "Failure", "Report", "contract_cases", "distinct_values", "run_contract"]
