# SPDX-License-Identifier: MIT OR Apache-2.0
"""Errors say what went wrong, on which rank, and what to do; nothing hangs.

    python examples/errors.py

All ranks raise the same error for a mistake, and after a mismatch the group still works.
"""

import time

import numpy as np

import ferrodist
from ferrodist.testing import run_ranks


def different_shapes(backend):
    ferrodist.allreduce(np.zeros(3 if backend.rank else 4, np.float32), backend)


def different_calls(backend):
    if backend.rank == 2:
        ferrodist.barrier(backend)
    else:
        ferrodist.allreduce(1.0, backend)


def late(backend):
    if backend.rank == 1:
        time.sleep(0.6)  # busy with something else
    else:
        ferrodist.allreduce(1.0, backend, timeout=0.3)


def gone(backend):
    if backend.rank == 1:
        raise ValueError("bad file on rank 1")
    ferrodist.allreduce(1.0, backend)


def mean_of_integers(backend):
    ferrodist.allreduce(np.arange(3), backend, op="mean")


if __name__ == "__main__":
    for mistake in (different_shapes, different_calls, late, gone, mean_of_integers):
        print(f"--- {mistake.__name__.replace('_', ' ')}")
        try:
            run_ranks(3, mistake)
        except ExceptionGroup as group:  # the errors of all ranks, causes first
            print(f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}")
            print(f"({group})")
