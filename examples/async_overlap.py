# SPDX-License-Identifier: MIT OR Apache-2.0
"""Overlap communication with computation: ``async_op=True`` returns a handle immediately.

    python examples/async_overlap.py

A backward pass finishes the last layer first. Its gradient can be sent while the earlier layers are
still being computed; only the update has to wait.
"""

import time

import numpy as np

import ferrodist
from ferrodist.testing import run_ranks

LAYERS = 6
SIZE = 1_000_000


def gradient_of(layer, rank):
    time.sleep(0.02)  # stands for computation on a device that leaves this CPU free
    return np.full(SIZE, float(layer * 10 + rank), np.float32)


def one_after_the_other(backend):
    start = time.perf_counter()
    for layer in reversed(range(LAYERS)):
        ferrodist.allreduce(gradient_of(layer, backend.rank), backend, op="mean")
    return time.perf_counter() - start


def overlapped(backend):
    start = time.perf_counter()
    flights = []
    for layer in reversed(range(LAYERS)):
        gradient = gradient_of(layer, backend.rank)  # do not modify it while the call is in flight
        flights.append(ferrodist.allreduce(gradient, backend, op="mean", async_op=True))
    means = [flight.wait() for flight in flights]
    return time.perf_counter() - start, means


if __name__ == "__main__":
    print(f"one after the other: {run_ranks(3, one_after_the_other)[0] * 1e3:.0f} ms")
    seconds, means = run_ranks(3, overlapped)[0]
    print(f"overlapped: {seconds * 1e3:.0f} ms")
    print("means by layer, last first:", [float(mean[0]) for mean in means])
