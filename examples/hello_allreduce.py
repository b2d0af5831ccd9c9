# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shortest program: three ranks add up their arrays.

    python examples/hello_allreduce.py

The ranks are threads of this process, so nothing has to be installed or started. ``run_ranks`` runs
one function on every rank and returns the results in rank order.
"""

import numpy as np

import ferrodist
from ferrodist.testing import run_ranks


def hello(backend):
    mine = np.full(4, backend.rank + 1.0)
    total = ferrodist.allreduce(mine, backend)
    return f"rank {backend.rank} of {backend.world_size}: put in {mine}, got {total}"


if __name__ == "__main__":
    for line in run_ranks(3, hello):
        print(line)
