# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train a small network with DDP; the loss does not depend on the number of ranks.

    python examples/train_mlp.py
    ferrodist run -n 2 examples/train_mlp.py
    torchrun --nproc-per-node 2 examples/train_mlp.py

The batch of a step is the same for any number of ranks, and each rank takes its share. Only the
order of summation differs, so losses differ by less than 1 in 1000 after 300 steps.
"""

import argparse
import sys

import torch

import ferrodist

BATCH = 96


def whole_batch(step):
    """Return points in a square and their distances from a circle; depends only on the step."""
    random = torch.Generator().manual_seed(step)
    points = torch.rand(BATCH, 2, generator=random) * 2 - 1
    return points, points.norm(dim=1, keepdim=True) - 0.7


def show_progress(backend, done, steps):
    if backend.rank == 0 and sys.stderr.isatty():
        bar, end = "#" * (30 * done // steps), "\n" * (done == steps)
        print(f"\r[{bar:30}] {done}/{steps}", end=end, file=sys.stderr)


def train(backend, steps):
    torch.set_num_threads(1)  # more threads do not help so small a model
    torch.manual_seed(0)  # only rank 0's parameters matter: DDP copies them to the others
    layers = [torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = ferrodist.DDP(torch.nn.Sequential(*layers), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = (part[backend.rank :: backend.world_size] for part in whole_batch(step))
        # Sum over the share, divided by the mean share: also right if 96 is not divisible.
        loss = (model(x) - y).square().sum() * backend.world_size / BATCH
        optimizer.zero_grad()
        loss.backward()  # every rank now has the gradients of the whole batch
        optimizer.step()
        show_progress(backend, step + 1, steps)
    return ferrodist.allreduce(loss.item(), backend, op="mean")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    with ferrodist.init() as backend:
        loss = train(backend, parser.parse_args().steps)
        if backend.rank == 0:
            print(f"final loss {loss:.6f} (ranks: {backend.world_size})")
