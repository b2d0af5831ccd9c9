# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a type checker must know of the calls: read by the mypy of ``make lint``, never run."""

from typing import assert_type

import ferrodist

backend = ferrodist.init()
assert_type(ferrodist.allreduce(1.0, backend), float)
assert_type(backend.allreduce(1.0), float)
assert_type(backend.broadcast(1.0, async_op=True), ferrodist.Work[float])
assert_type(backend.reduce(1.0), float | None)
assert_type(backend.grid(2).dup().coords, tuple[int, ...])
