# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fit a line to noisy points on four processes, in plain NumPy.

    python examples/train_numpy.py

Each rank has its own points. One allreduce per step averages all gradients at once, as a dict of
arrays. So every rank makes the same step, and the weights stay equal.
"""

import numpy as np

import ferrodist

SLOPES, OFFSET = np.array([2.0, -3.0]), 0.5


def own_points(rank):
    random = np.random.default_rng(rank)
    x = random.normal(size=(100, 2))
    return x, x @ SLOPES + OFFSET + random.normal(scale=0.01, size=100)


def train(backend):
    x, y = own_points(backend.rank)
    slopes, offset = np.zeros(2), np.zeros(1)
    for step in range(101):
        error = x @ slopes + offset - y
        mine = {"slopes": x.T @ error / len(y), "offset": error.mean(keepdims=True)}
        mean = ferrodist.allreduce(mine, backend, op="mean")
        slopes -= 0.1 * mean["slopes"]
        offset -= 0.1 * mean["offset"]
        if step % 50 == 0:
            loss = ferrodist.allreduce(float(np.mean(error**2)), backend, op="mean")
            if backend.rank == 0:
                print(f"step {step:3}: loss {loss:.4f}")
    return slopes, offset


if __name__ == "__main__":
    trained = ferrodist.run(train, ranks=4)
    slopes, offset = trained[0]
    print(f"slopes {slopes.round(2)}, offset {offset.round(2)}")
    print("all ranks agree:", all(np.array_equal(slopes, other) for other, _ in trained))
