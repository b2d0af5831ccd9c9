# SPDX-License-Identifier: MIT OR Apache-2.0
"""Test distributed code with pytest and the ``world`` fixture of ferrodist.

    pytest examples/test_my_code.py

A test that uses ``world`` runs once for every world size. If a rank fails or hangs, the test fails
and names it; the other ranks are not left waiting.
"""

import numpy as np
import pytest

import ferrodist


def standardize(x, backend):
    """Code under test: standardize by mean and deviation over all ranks."""
    count, total = ferrodist.allreduce([float(len(x)), float(x.sum())], backend)
    mean = total / count
    variance = ferrodist.allreduce(float(((x - mean) ** 2).sum()), backend) / count
    return (x - mean) / np.sqrt(variance)


def test_standardize_is_the_same_on_any_number_of_ranks(world):
    whole = np.arange(12.0)
    parts = np.array_split(whole, world.size)
    results = world.run(lambda backend: standardize(parts[backend.rank], backend))
    np.testing.assert_allclose(np.concatenate(results), (whole - whole.mean()) / whole.std())


@pytest.mark.world(2, 4)
def test_ranks_with_different_shapes_are_named(world):
    def call_with_my_own_shape(backend):
        with pytest.raises(ferrodist.CollectiveMismatch, match="rank 1"):
            ferrodist.allreduce(np.zeros(3 + (backend.rank == 1)), backend)

    world.run(call_with_my_own_shape)
