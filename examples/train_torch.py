# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train a PyTorch model on three processes: pass tensors, get tensors.

    pip install '.[torch]'
    python examples/train_torch.py

After ``backward``, one allreduce averages all gradients as a list of tensors. ``out=`` writes the
means into the gradients, where the optimizer expects them.
"""

import torch

import ferrodist


def new_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(backend):
    torch.manual_seed(backend.rank)  # all models differ until the broadcast
    model = new_model()
    weights = [weight.detach() for weight in model.parameters()]
    ferrodist.broadcast(weights, backend, out=weights)  # every rank starts as rank 0 does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(backend.rank)  # every rank has its own data
    for step in range(151):
        x = torch.rand(64, 2, generator=random) * 2 - 1
        target = x.prod(dim=1, keepdim=True)
        loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters()]
        ferrodist.allreduce(gradients, backend, op="mean", out=gradients)
        optimizer.step()
        if step % 50 == 0 and backend.rank == 0:
            print(f"step {step:3}: loss {loss.item():.4f}")
    return [weight.numpy() for weight in weights]


if __name__ == "__main__":
    first, *others = ferrodist.run(train, ranks=3)
    equal = all((a == b).all() for other in others for a, b in zip(first, other, strict=True))
    print("all ranks have the same weights:", equal)
