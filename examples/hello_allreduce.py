# SPDX-License-Identifier: MIT OR Apache-2.0
"""Add up the arrays of three ranks, in the shortest program.

    python examples/hello_allreduce.py

The ranks are processes that share memory. ``ferrodist.run`` starts them, calls a function on each
and returns the results in rank order.
"""

import numpy as np

import ferrodist


def hello(backend):
    mine = np.full(4, backend.rank + 1.0)
    total = ferrodist.allreduce(mine, backend)
    return f"rank {backend.rank} of {backend.world_size}: put in {mine}, got {total}"


if __name__ == "__main__":
    for line in ferrodist.run(hello, ranks=3):
        print(line)
