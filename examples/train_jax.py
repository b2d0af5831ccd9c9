# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train with JAX on three processes: pass JAX arrays, get new JAX arrays.

    pip install '.[jax]'
    python examples/train_jax.py

The gradients of a dict of weights are a dict of arrays. One allreduce averages the whole dict.
"""

import jax
import jax.numpy as jnp

import ferrodist


def loss_of(weights, x, y):
    hidden = jnp.tanh(x @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def new_weights():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(first, (2, 16)),
        "bias": jnp.zeros(16),
        "out": jax.random.normal(second, (16,)) / 4,
    }


def train(backend):
    x = jax.random.uniform(jax.random.key(backend.rank), (128, 2), minval=-1, maxval=1)
    y = x[:, 0] * x[:, 1]
    weights = new_weights()
    loss_and_gradients = jax.jit(jax.value_and_grad(loss_of))
    for step in range(151):
        loss, gradients = loss_and_gradients(weights, x, y)
        gradients = ferrodist.allreduce(gradients, backend, op="mean")
        weights = {name: weights[name] - 0.3 * gradients[name] for name in weights}
        if step % 50 == 0:
            loss = ferrodist.allreduce(loss, backend, op="mean")
            if backend.rank == 0:
                print(f"step {step:3}: loss {loss:.4f}")
    return weights


if __name__ == "__main__":
    first, *others = ferrodist.run(train, ranks=3)
    equal = all(bool((first[name] == other[name]).all()) for other in others for name in first)
    print("all ranks have the same weights:", equal)
