"""The backend contract in shared memory, and the bits of the simulated backend."""

from __future__ import annotations

from typing import Any

import pytest

from ferrodist.testing import contract_cases, run_contract, run_ranks
from reductions import reductions

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


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_dtype_and_operation_has_the_bits_of_the_simulated_backend(start_job, nbytes):
    with start_job(3, lambda backend, pipe: reductions(backend, nbytes)) as job:
        found = job.results()
    assert found == run_ranks(3, lambda backend: reductions(backend, nbytes))
