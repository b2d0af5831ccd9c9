# SPDX-License-Identifier: MIT OR Apache-2.0
"""Continue training after a rank has died.

    python examples/survivors.py

All other ranks get an error that names the lost rank. They make a group of the survivors, agree on
a state, because some may have made one step more than others, and continue. Under ``ferrodist run``
use ``--keep-survivors``; torchrun and mpiexec end all ranks when one fails.
"""

import os
import signal

import numpy as np

import ferrodist


def without_lost(group, error):
    """Make a group of the survivors; more ranks may be lost meanwhile."""
    lost = set()
    while True:
        lost.add(error.rank)
        try:
            return group.split([rank for rank in range(group.world_size) if rank not in lost])
        except ferrodist.RankLost as another:
            error = another


def agree(group, step, weights):
    """Take step and weights from a rank that has made the most steps."""
    steps = ferrodist.all_gather(step, group)
    root = int(steps.argmax())
    return int(steps[root]), ferrodist.broadcast(weights, group, root=root)


def train(backend):
    group, step, weights = backend, 0, np.zeros(2)
    while step < 10:
        if backend.rank == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        gradient = weights - [3.0, 4.0] + np.random.default_rng(step).normal(size=2) * 0.01
        try:
            weights = weights - 0.5 * ferrodist.allreduce(gradient, group, op="mean")
            step += 1
        except ferrodist.RankLost as error:
            group = without_lost(group, error)
            step, weights = agree(group, step, weights)
            if group.rank == 0:
                print(f"rank {error.rank} is lost, {group.world_size} ranks go on at step {step}")
    if group.rank == 0:
        print(f"{group.world_size} ranks made {step} steps: {weights.round(1)}")


if __name__ == "__main__":
    try:
        ferrodist.run(train, ranks=4, grace=30.0)  # seconds that the others have after a loss
    except ferrodist.RankLost as error:
        print(f"RankLost: {error}".splitlines()[0])
