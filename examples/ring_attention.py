# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compute attention over a sequence that is split between ranks, in a ring.

    python examples/ring_attention.py

Every rank keeps its queries. While it computes with one block of keys and values, it already sends
that block to the next rank and receives another one. The running sums are scaled by the largest
score so far, so the result is the softmax over the whole sequence.
"""

import numpy as np

import ferrodist


def attend(scores, values, state):
    """Add a block to the running sums: largest score, sum of weights, weighted values."""
    top, weight, total = state
    new_top = np.maximum(top, scores.max(axis=-1, keepdims=True))
    shrink, parts = np.exp(top - new_top), np.exp(scores - new_top)
    return (
        new_top,
        weight * shrink + parts.sum(axis=-1, keepdims=True),
        total * shrink + parts @ values,
    )


def ring_attention(queries, keys, values, backend):
    """Return the attention of this rank's queries to the keys and values of all ranks."""
    rank, world = backend.rank, backend.world_size
    state = np.full((len(queries), 1), -np.inf), 0.0, 0.0
    block = np.stack([keys, values])
    for turn in range(world):
        flying = None
        if turn < world - 1:
            right, left = (rank + 1) % world, (rank - 1) % world
            flying = ferrodist.sendrecv(block, right, left, backend, async_op=True)
        scores = queries @ block[0].T / np.sqrt(queries.shape[1])
        state = attend(scores, block[1], state)
        if flying is not None:
            block = flying.wait()
    return state[2] / state[1]


def attention(queries, keys, values):
    """Do the same on one rank, with all scores at once."""
    scores = np.exp(queries @ keys.T / np.sqrt(queries.shape[1]))
    return scores @ values / scores.sum(axis=-1, keepdims=True)


def attend_to_all(backend):
    parts = [x.reshape(backend.world_size, -1, 16)[backend.rank] for x in make_sequence()]
    return ring_attention(*parts, backend)


def make_sequence(length=240):
    return np.random.default_rng(0).normal(size=(3, length, 16))


if __name__ == "__main__":
    found = np.concatenate(ferrodist.run(attend_to_all, ranks=4))
    error = np.abs(found - attention(*make_sequence())).max()
    print(f"{found.shape}, as on one rank: {error < 1e-12}")
