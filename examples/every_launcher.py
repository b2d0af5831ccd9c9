# SPDX-License-Identifier: MIT OR Apache-2.0
"""One script for every launcher: it does not need to know how it was started.

    python examples/every_launcher.py
    ferrodist run -n 4 examples/every_launcher.py
    torchrun --nproc-per-node 4 examples/every_launcher.py
    mpiexec -n 4 python examples/every_launcher.py

It prints one line per rank; with plain python there is one rank.
"""

import numpy as np

import ferrodist


def main():
    backend = ferrodist.init()
    rank, size = backend.rank, backend.world_size
    total = ferrodist.allreduce(np.arange(4.0) + 10 * rank)
    first = ferrodist.broadcast(np.full(2, 7 + rank), root=size - 1)
    print(f"rank {rank} of {size}: {total.tolist()} {first.tolist()}\n", end="", flush=True)


if __name__ == "__main__":
    main()
