# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sort numbers that are distributed over ranks, with sample sort.

    python examples/sample_sort.py

Each rank sorts its own part and shares some samples of it. From these, all ranks choose the same
bounds, send every number to the rank whose bounds contain it, and sort what they receive.
"""

import numpy as np

import ferrodist


def sample_sort(x, backend):
    """Return this rank's part of the sorted numbers; rank 0 has the smallest."""
    x = np.sort(x)
    samples = np.sort(ferrodist.all_gather_uneven(x[::64], backend))
    bounds = [part[0] for part in np.array_split(samples, backend.world_size)[1:] if len(part)]
    ends = np.searchsorted(x, bounds)
    counts = np.diff([0, *ends, len(x)])
    mine, _ = ferrodist.all_to_all_uneven(x, counts.tolist(), backend)
    return np.sort(mine)


def numbers_of(rank):
    """Return this rank's numbers; those of rank 2 are all equal, and rank 3 has none."""
    if rank == 3:
        return np.empty(0)
    random = np.random.default_rng(rank)
    return np.full(500, 0.25) if rank == 2 else random.exponential(size=10_000 + 1000 * rank)


def sort_numbers(backend):
    return sample_sort(numbers_of(backend.rank), backend)


if __name__ == "__main__":
    parts = ferrodist.run(sort_numbers, ranks=4)
    alone = np.sort(np.concatenate([numbers_of(rank) for rank in range(4)]))
    is_same = np.array_equal(np.concatenate(parts), alone)
    print(f"parts of {[len(part) for part in parts]} numbers, as sorted on one rank: {is_same}")
