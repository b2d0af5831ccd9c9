"""The backend contract in shared memory, and the bits of the simulated backend."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.testing import contract_cases, distinct_values, run_contract, run_ranks
from ferrodist.testing.contract.values import DTYPES, FLOATS, INTEGERS, legal_ops, numpy_dtype

pytestmark = pytest.mark.timeout(100)

SEED = 0
slow = [pytest.mark.slow, pytest.mark.timeout(400)]
WORLDS = [
    *(pytest.param(world, marks=slow) for world in (1, 2, 3)),
    *(pytest.param(world, marks=[*slow, pytest.mark.long]) for world in (4, 5, 6, 7, 8)),
]


def keep_contract(start_job: Any, world: int, libraries: Any) -> None:
    """Run the contract suite and expect nothing to be wrong."""

    def body(backend, pipe):
        assert type(backend).__name__ == "SharedMemoryBackend"
        cases = contract_cases(backend.world_size, SEED, libraries=libraries)
        return run_contract(backend, cases)

    with start_job(world, body) as job:
        reports = job.results(390)
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))
    assert all(report.num_cases > 2000 for report in reports)


@pytest.mark.parametrize("world", WORLDS)
def test_shared_memory_backend_keeps_the_contract(start_job, world):
    """Arrays of other libraries are converted alike in every world: of the short ones, in 3."""
    keep_contract(start_job, world, ["numpy"] if world < 3 else None)


@pytest.mark.long
@pytest.mark.parametrize("world", [pytest.param(world, marks=slow) for world in (1, 2)])
def test_shared_memory_backend_keeps_the_whole_contract(start_job, world):
    keep_contract(start_job, world, None)


# -- the same bits as the simulated backend --------------------------------------------------------

SIZES = [48, 40_000, 300_000]  # bytes: for a slot, for one stage, for several


def digest_without_nan_payloads(x: Any) -> str:
    """Hash an array; all NaNs are the same."""
    if x.dtype.name in (*FLOATS, "complex64", "complex128"):
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()


def special_values(dtype: str) -> list[str]:
    if dtype == "bool":
        return ["distinct"]
    return ["distinct", "wrapping" if dtype in INTEGERS else "special"]


def reductions(backend: Any, nbytes: int) -> dict[Any, str]:
    """Reduce arrays of every dtype with every operation; return digests of the results."""
    found = {}
    for number, dtype in enumerate(DTYPES):
        count = nbytes // numpy_dtype(dtype).itemsize // 3 * 3
        for op in legal_ops(dtype):
            for values in special_values(dtype):
                x = distinct_values(backend.rank, (count,), dtype, seed=number, values=values)
                root = number % backend.world_size
                results = {
                    "allreduce": ferrodist.allreduce(x, backend, op),
                    "reduce_scatter": ferrodist.reduce_scatter(x, backend, op),
                    "reduce": ferrodist.reduce(x, backend, root, op),
                }
                for name, result in results.items():
                    if result is not None:
                        found[name, dtype, op, values] = digest_without_nan_payloads(result)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_dtype_and_operation_has_the_bits_of_the_simulated_backend(start_job, nbytes):
    with start_job(3, lambda backend, pipe: reductions(backend, nbytes)) as job:
        found = job.results()
    assert found == run_ranks(3, lambda backend: reductions(backend, nbytes))
