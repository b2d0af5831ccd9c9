# SPDX-License-Identifier: MIT OR Apache-2.0
"""The public functions: check what was passed, hand it to the backend, wrap the result.

``request`` and ``plan`` are the way all of them go; the other files hold the functions themselves.
Nothing here knows an array library (that is ``arrays``) or an algorithm (that is ``schedules``).
"""

from ferrodist.collectives.dense import (
    all_gather,
    all_to_all,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
)
from ferrodist.collectives.messages import (
    probe,
    recv,
    recv_object,
    send,
    send_object,
    sendrecv,
    try_probe,
)
from ferrodist.collectives.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    scatter_object,
)
from ferrodist.collectives.scatter import scatter, scatter_uneven
from ferrodist.collectives.uneven import (
    all_gather_uneven,
    all_to_all_uneven,
    gather_uneven,
    reduce_scatter_uneven,
)

__all__ = [
    "allreduce", "allreduce_", "broadcast", "broadcast_", "reduce", "all_gather",
    "all_gather_uneven", "gather", "gather_uneven", "scatter", "scatter_uneven", "reduce_scatter",
    "reduce_scatter_uneven", "scan", "exscan", "all_to_all", "all_to_all_uneven", "barrier", "send",
    "recv", "sendrecv", "probe", "try_probe", "send_object", "recv_object", "broadcast_object",
    "all_gather_object", "gather_object", "scatter_object",
]  # fmt: skip
