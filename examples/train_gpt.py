# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train a small GPT on the text of this file; the loss does not depend on the number of ranks.

    ferrodist run -n 2 examples/train_gpt.py
    python examples/train_gpt.py

The ranks share each batch. Only the order of summation differs, so losses differ by less than 1 %.
"""

import argparse
from pathlib import Path
from sys import stderr

import torch
from torch import nn

import ferrodist

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
BATCH, LENGTH, WIDTH = 24, 48, 64  # 24 sequences: for 1, 2, 3, 4, 6, 8, 12 or 24 ranks


class GPT(nn.Module):
    """A model of two layers with tied input and output embeddings."""

    def __init__(self):
        super().__init__()
        self.read, self.write = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.read.weight = self.write.weight
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), False)

    def forward(self, text):
        """Predict the next byte at each position from the bytes up to it."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.write(self.layers(self.read(text) + self.places, mask))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps, backend = parser.parse_args().steps, ferrodist.init()
    torch.set_num_threads(1)  # more threads do not help so small a model
    torch.manual_seed(0)  # for rank 0, whose parameters DDP copies to the others
    model = ferrodist.DDP(GPT(), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1), generator=torch.manual_seed(step))
        text = TEXT[starts + torch.arange(LENGTH + 1)][backend.rank :: backend.world_size]
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if backend.rank == 0 and stderr.isatty():
            print(f"\r[{'#' * (30 * step // steps):30}]", end="\n" * (step == steps), file=stderr)
    loss = ferrodist.allreduce(loss.item(), op="mean")
    if backend.rank == 0:
        print(f"final loss {loss:.4f} (ranks: {backend.world_size})")
