# SPDX-License-Identifier: MIT OR Apache-2.0
"""Solve a heat equation on a plate that is divided into blocks, one for each rank of a grid.

    python examples/heat.py

A block has a halo: one row or column on each side that holds the edge of the neighbor's block.
Before every step, each rank exchanges edges with its neighbors. The result has the same bits as in
one process with the whole plate.
"""

import math

import numpy as np

import ferrodist


def step(plate):
    """Make one time step on the whole plate except its outermost rows and columns."""
    middle = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    middle += 0.1 * (around - 4 * middle)


def exchange(grid, block):
    """Send the edges of a block to the neighbors, and store theirs in its halo."""
    edges = [block[1, 1:-1], block[-2, 1:-1], block[1:-1, 1], block[1:-1, -2]]
    halos = [block[0, 1:-1], block[-1, 1:-1], block[1:-1, 0], block[1:-1, -1]]
    for halo, edge in zip(halos, grid.neighbor_all_to_all(edges), strict=True):
        if edge is not None:  # at the border of the plate the halo does not change
            halo[:] = edge


def cut(length, parts, place):
    """Return the slice of a part of the inner rows, with one more row on each side."""
    bounds = np.linspace(0, length - 2, parts + 1).astype(int)
    return slice(bounds[place], bounds[place + 1] + 2)


def solve(backend, plate, num_steps):
    """Return the plate after num_steps steps on rank 0, and None on other ranks."""
    rows = max(
        n for n in range(1, math.isqrt(backend.world_size) + 1) if backend.world_size % n == 0
    )
    grid = backend.grid((rows, backend.world_size // rows))
    place = tuple(map(cut, plate.shape, grid.shape, grid.coords))
    block = plate[place].copy()
    for _ in range(num_steps):
        exchange(grid, block)
        step(block)
    found = ferrodist.gather_object((place, block), grid)
    for part, values in found or []:
        plate[part][1:-1, 1:-1] = values[1:-1, 1:-1]
    return plate if grid.rank == 0 else None


def make_plate(rows=50, columns=71):
    """Return a cold plate with two hot borders."""
    plate = np.zeros((rows, columns))
    plate[0], plate[:, -1] = 100.0, np.linspace(0, 50, rows)
    return plate


if __name__ == "__main__":
    found = ferrodist.run(solve, 4, args=(make_plate(), 200))[0]
    alone = make_plate()
    for _ in range(200):
        step(alone)
    print(f"mean {found.mean():.3f} degrees, as on one rank: {np.array_equal(found, alone)}")
