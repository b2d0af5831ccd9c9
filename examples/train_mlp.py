# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train a small network with DDP; the loss does not depend on the number of ranks.

    python examples/train_mlp.py
    ferrodist run -n 2 examples/train_mlp.py
    torchrun --nproc-per-node 2 examples/train_mlp.py

A step's batch is the same for any number of ranks, and each takes its share. Losses differ in the
last digits only, because sums are made in another order: by less than 1 in 1000 after 300 steps.
"""

import argparse
import sys

import torch

import ferrodist

BATCH = 96


def whole_batch(step):
    """Points in a square, and how far each is from a circle: a function of the step alone."""
    random = torch.Generator().manual_seed(step)
    points = torch.rand(BATCH, 2, generator=random) * 2 - 1
    return points, points.norm(dim=1, keepdim=True) - 0.7


def show_progress(backend, done, steps):
    if backend.rank == 0 and sys.stderr.isatty():
        bar, end = "#" * (30 * done // steps), "\n" * (done == steps)
        print(f"\r[{bar:30}] {done}/{steps}", end=end, file=sys.stderr)


def train(backend, steps):
    torch.set_num_threads(1)  # so small a model gains nothing by more
    torch.manual_seed(0)  # only what rank 0 has counts: DDP copies it to the others
    layers = [torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = ferrodist.DDP(torch.nn.Sequential(*layers), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = (part[backend.rank :: backend.world_size] for part in whole_batch(step))
        # Summed over the share and divided by the mean share: right where 96 is not divisible too.
        loss = (model(x) - y).square().sum() * backend.world_size / BATCH
        optimizer.zero_grad()
        loss.backward()  # the gradients are now those of the whole batch, on every rank
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
