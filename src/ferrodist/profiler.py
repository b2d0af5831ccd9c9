# SPDX-License-Identifier: MIT OR Apache-2.0
"""Events of torch's profiler, if the program has imported torch and a profiler runs.

Native code does the same for the calls that it does (``native/bind/profiler.hpp``).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NO_EVENT: AbstractContextManager[Any] = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Show what a ``with`` block does as one event; does nothing while no profiler runs."""
    torch_profiler = sys.modules.get("torch.autograd.profiler")
    if torch_profiler is None or not getattr(torch_profiler, "_is_profiler_enabled", False):
        return _NO_EVENT
    event: AbstractContextManager[Any] = torch_profiler.record_function(name)
    return event
