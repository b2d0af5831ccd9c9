# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write a collective algorithm, let the verifier prove it, and use it.

    python examples/own_schedule.py

An algorithm is a function that yields the steps of one rank. It does not send or wait itself, so
ferrodist can check it before any data moves, and then run it on any backend.
"""

import numpy as np

import ferrodist
from ferrodist.call import Kind
from ferrodist.schedules import (
    Recv,
    Schedule,
    Send,
    Step,
    mine,
    one_chunk,
    out,
    reduce_or_copy,
    scratch,
    verify,
)
from ferrodist.testing import run_ranks


def everybody_reduces(rank, world, root):
    """Send the whole array to all other ranks, then reduce all arrays in rank order."""
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (mine(0),)), Recv(below, (scratch(0, below),)))
    inputs = tuple(mine(0) if peer == rank else scratch(0, peer) for peer in range(world))
    yield Step(then=(reduce_or_copy(out(0), inputs),))


def forgets_the_last(rank, world, root):
    """Do the same with a mistake: omit the last round."""
    *steps, _, local_reduce = everybody_reduces(rank, world, root)
    yield from [*steps, local_reduce]


good = Schedule("everybody_reduces", Kind.ALLREDUCE, everybody_reduces, chunks=one_chunk)
bad = Schedule("forgets_the_last", Kind.ALLREDUCE, forgets_the_last, chunks=one_chunk)


def use(backend):
    return ferrodist.allreduce(np.full(3, backend.rank), backend, algorithm=good)


if __name__ == "__main__":
    facts = verify(good, world=4)
    print(f"proved: {facts.num_messages} messages, in rank order: {facts.in_order}")
    print("used:", run_ranks(4, use)[0])
    try:
        verify(bad, world=4)
    except ferrodist.InvalidArgument as error:
        print("refused:", error)
