# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train with a sampler, a schedule and checkpoints, and resume a job that was stopped.

    python examples/train_resume.py
    ferrodist run -n 2 examples/train_resume.py --file my.pt --stop 17
    ferrodist run -n 3 examples/train_resume.py --file my.pt

The last two commands end with the loss of the first, because a checkpoint does not depend on the
number of ranks. On several hosts, all hosts must see the same file.
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

import ferrodist

BATCH, EPOCHS = 24, 4  # BATCH: samples per step, over all ranks


def save(path, states):
    torch.save(states, f"{path}.new")  # an incomplete file never replaces a good one
    os.replace(f"{path}.new", path)


def train(backend, path, stop, workers):
    torch.manual_seed(0)  # for rank 0, whose parameters DDP copies to the others
    x = torch.rand(240, 2, generator=torch.Generator().manual_seed(7)) * 2 - 1
    y, size = x.prod(1, keepdim=True), BATCH // backend.world_size
    sampler = ferrodist.ShardedSampler(x)  # every pass is an epoch with a new order
    loader = DataLoader(TensorDataset(x, y), size, sampler=sampler, num_workers=workers)
    layers = [torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
    model = ferrodist.DDP(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    for name, state in torch.load(path).items() if os.path.exists(path) else ():
        parts[name].load_state_dict(state)
    for _ in range(sampler.epoch, EPOCHS):
        for step, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            if path and backend.rank == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                states["sampler"] = sampler.state_dict(step * size)  # used, not only fetched
                save(path, states)
            if schedule.last_epoch == stop:
                return f"stopped after step {stop}"
    with torch.no_grad():  # any rank can do this alone: model.module does not communicate
        return f"final loss {torch.nn.functional.mse_loss(model.module(x), y):.6f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", default="", help="the checkpoint, written after every step")
    parser.add_argument("--stop", type=int, help="end after this step")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    options = parser.parse_args()
    with ferrodist.init() as backend:
        text = train(backend, options.file, options.stop, options.workers)
        if backend.rank == 0:
            print(f"{text} (ranks: {backend.world_size})")
