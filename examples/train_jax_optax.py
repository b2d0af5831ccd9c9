# SPDX-License-Identifier: MIT OR Apache-2.0
"""Train a JAX model with optax, with the same result on any number of ranks.

    pip install '.[jax]' optax
    python examples/train_jax_optax.py
    ferrodist run -n 2 examples/train_jax_optax.py

Every rank takes its share of each batch. The mean of the gradients, weighted by samples, is the
gradient of the whole batch. So the final loss is the same on any number of ranks, within 1 %
(rounding differs).
"""

import jax
import jax.numpy as jnp
import optax

import ferrodist

optimizer = optax.adam(0.02)


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


loss_and_gradients = jax.jit(jax.value_and_grad(loss_of))


@jax.jit
def step(params, state, gradients):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def new_params(key):
    first, second = jax.random.split(key)
    weights = {"in": jax.random.normal(first, (2, 16)), "bias": jnp.zeros(16)}
    return weights | {"out": jax.random.normal(second, (16,)) / 4}


if __name__ == "__main__":
    backend = ferrodist.init()
    x = jax.random.uniform(jax.random.key(7), (1000, 2), minval=-1, maxval=1)
    y = x[:, 0] * x[:, 1]
    parallel = ferrodist.DataParallel(new_params(jax.random.key(backend.rank)))
    params = parallel.params  # rank 0's parameters, on every rank
    state = optimizer.init(params)
    shards = ferrodist.shard_indices(len(x), global_batch_size=200)
    while shards.epoch < 30:
        for batch in shards:
            loss, gradients = loss_and_gradients(params, x[batch], y[batch])
            gradients = parallel.average(gradients, weight=len(batch))
            params, state = step(params, state, gradients)
        if backend.rank == 0 and shards.epoch % 10 == 0:
            print(f"epoch {shards.epoch:2}: loss {loss:.4f} on the last batch of rank 0")
    parallel.check_replicas(params)
    if backend.rank == 0:
        print(f"world of {backend.world_size}: final loss {loss_of(params, x, y):.6f}")
