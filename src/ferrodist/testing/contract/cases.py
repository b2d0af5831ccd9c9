# SPDX-License-Identifier: MIT OR Apache-2.0
"""The list of cases: everything for allreduce, every pair of circumstances for the other calls."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.dense_cases import dense_cases, full_allreduce, large_cases
from ferrodist.testing.contract.dtypes import OPS, available_dtypes, legal_ops
from ferrodist.testing.contract.groups import NEEDS_TWO
from ferrodist.testing.contract.groups import SCENARIOS as GROUPS
from ferrodist.testing.contract.inputs import REDUCTIONS
from ferrodist.testing.contract.libraries import available_libraries, can_hold
from ferrodist.testing.contract.messages import RINGS
from ferrodist.testing.contract.messages import SCENARIOS as MESSAGES
from ferrodist.testing.contract.mismatches import MISMATCHES
from ferrodist.testing.contract.objects import OBJECT_FUNCTIONS, OBJECTS
from ferrodist.testing.contract.refusals import REFUSALS
from ferrodist.testing.contract.synchronised import HAS_ROOT, SYNCHRONISING
from ferrodist.testing.contract.trees import TREE_FUNCTIONS


def contract_cases(
    world: int,
    seed: int = 0,
    *,
    algorithms: bool = True,
    in_order: bool = True,
    libraries: Sequence[str] | None = None,
) -> list[Case]:
    """List what a backend must get right in a world of this size; the same list for one seed.

    Args:
        world: The number of ranks.
        seed: Decides the values, which pairs meet in one case, and the order of the list.
        algorithms: Whether the backend takes ``algorithm=``.
        in_order: Whether it folds in rank order by default; if not, only ``reproducible=True`` and
            algorithms that keep the order are compared to the bit.
        libraries: The array libraries to use; those installed if not given.
    """
    libraries = available_libraries() if libraries is None else tuple(libraries)
    cases = [
        *full_allreduce(in_order),
        *dense_cases(world, seed, algorithms, in_order, libraries),
        *large_cases(world, algorithms, in_order),
        *_empty_trees(world),
        *_synchronised(world),
        *_illegal_ops(),
        *_refusals(world, algorithms),
        *_objects(world),
        *_groups(world),
    ]
    if world > 1:
        cases += [*_mismatches(world, algorithms), *_messages(libraries)]
    # Shuffled, so that what a call leaves behind meets calls of every other kind.
    random.Random(seed).shuffle(cases)
    return [replace(case, seed=seed, number=number) for number, case in enumerate(cases)]


def _empty_trees(world: int) -> Iterator[Case]:
    for function in TREE_FUNCTIONS:
        op = "SUM" if function in REDUCTIONS else ""
        yield Case(function, style="empty_tree", op=op, root=world - 1)


def _synchronised(world: int) -> Iterator[Case]:
    if world == 1:
        return
    for number, function in enumerate(SYNCHRONISING):
        root = number % world if function in HAS_ROOT else 0
        for late in ("late_root", "late_other"):
            for style in ("plain", "empty"):
                yield Case(function, "synchronised", late, root=root, style=style)


def _illegal_ops() -> Iterator[Case]:
    for dtype in available_dtypes():
        for op in OPS:
            if op not in legal_ops(dtype):
                for function in REDUCTIONS:
                    yield Case(function, "refused", dtype=dtype, op=op)


def _refusals(world: int, algorithms: bool) -> Iterator[Case]:
    for number, (name, refusal) in enumerate(REFUSALS.items()):
        if world < refusal.min_world or (refusal.needs_algorithms and not algorithms):
            continue
        yield Case("refused", "refused", name)
        if world > 1:
            yield Case("refused", "refused", name, style="one_rank", root=number % world)


def _mismatches(world: int, algorithms: bool) -> Iterator[Case]:
    for name, mismatch in MISMATCHES.items():
        if mismatch.needs_algorithms and not algorithms:
            continue
        for odd in sorted({1, world - 1}):
            yield Case("mismatch", "mismatch", name, root=odd)


def _messages(libraries: Sequence[str]) -> Iterator[Case]:
    mixed = "+".join(libraries)
    for name in MESSAGES:
        if name not in RINGS:
            yield Case("message", "message", name)
    for number, dtype in enumerate(available_dtypes()):
        for place, name in enumerate(RINGS):
            shape = ((), (0, 3), (7,), (12, 3), (4097,))[(number + place) % 5]
            library = mixed if can_hold(mixed, dtype) and name != "out_ring" else "numpy"
            yield Case("message", "message", name, shape=shape, dtype=dtype, library=library)


def _objects(world: int) -> Iterator[Case]:
    for number, function in enumerate(OBJECT_FUNCTIONS):
        for place, name in enumerate(OBJECTS):
            yield Case(function, "object", name, root=(number + place) % world)
        yield Case(function, "object", style="pickle", root=world - 1)


def _groups(world: int) -> Iterator[Case]:
    for name in GROUPS:
        if world > 1 or name not in NEEDS_TWO:
            yield Case("split", "group", name)
