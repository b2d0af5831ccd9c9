# SPDX-License-Identifier: MIT OR Apache-2.0
"""Data parallelism for trees of arrays, of NumPy, JAX or whatever else can be converted.

``average_gradients`` is one call and remembers nothing. ``DataParallel`` knows its tree, so it has
buckets for it, and ranks may have gradients for different leaves.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

import ferrodist
from ferrodist.arrays import InputArray, as_input, flatten, new_result
from ferrodist.arrays.library import numpy_dtype
from ferrodist.buffer import Buffer, DType
from ferrodist.parallel import backend_of
from ferrodist.parallel.bucket import MIB, BucketSizes, GradientSpec
from ferrodist.parallel.reducer import Reducer, drifted_ranks

Array = np.ndarray[Any, Any]

_REAL_PARTS = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}


def average_gradients(
    tree: Any, backend: ferrodist.Backend | None = None, *, weight: float | None = None
) -> Any:
    """Return the mean over all ranks of each array in a tree; every rank calls it.

    The results are new arrays of the same libraries; one collective computes all of them. All ranks
    pass the same structure, dtypes and shapes. ``weight``, for example this rank's number of
    samples, makes the mean a weighted one; arrays of a rank with weight 0 are ignored.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     gradients = {"w": np.full(2, float(backend.rank)), "b": None}
        ...     return ferrodist.average_gradients(gradients, backend, weight=backend.rank + 1)
        >>> run_ranks(3, body)[0]
        {'w': array([1.33333333, 1.33333333]), 'b': None}
    """
    if weight is None:
        return ferrodist.allreduce(tree, backend, op="mean")
    share = _check_weight(weight, "average_gradients")
    named, rebuild = flatten(tree, "average_gradients: tree")
    leaves = [_take_float(leaf, f"average_gradients: tree{path}") for path, leaf in named]
    scaled = rebuild([_scale(leaf.buffer, share) for leaf in leaves])
    sums, total = ferrodist.allreduce((scaled, share), backend)
    if total == 0:
        raise _refuse_no_weight("average_gradients")
    return rebuild(
        [
            _array_like(leaf, found / total, leaf.buffer.shape)
            for leaf, (_, found) in zip(leaves, flatten(sums)[0], strict=True)
        ]
    )


class _Slot(NamedTuple):
    """A leaf of the parameters: its place in the tree, what it is, and a small array like it."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    like: InputArray

    def __str__(self) -> str:
        return f"{self.dtype.label}{list(self.shape)}"

    def leaf(self, *, widened: bool) -> GradientSpec:
        """Say how it travels: complex numbers as pairs of real ones, 16 bits as 32 if asked."""
        dtype, shape = self.dtype, self.shape
        if dtype.is_complex:
            dtype, shape = _REAL_PARTS[dtype], (*shape, 2)
        if dtype.is_half and widened:
            dtype = DType.FLOAT32
        return GradientSpec(self.path, shape, dtype.label, dtype.itemsize)


class DataParallel:
    """Average the gradients of a tree of parameters (NumPy, JAX, ...) in buckets that are reused.

    Every rank makes one, of a tree with the same structure, dtypes and shapes. ``self.params`` is
    the tree of rank 0, as new arrays. ``bucket_mib`` is how many MiB are sent in one call.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     parallel = ferrodist.DataParallel({"w": np.full(2, backend.rank + 5.0)}, backend)
        ...     mean = parallel.average({"w": np.full(2, float(backend.rank))})
        ...     return parallel.params["w"] - 0.1 * mean["w"]
        >>> run_ranks(3, body)[2]
        array([4.9, 4.9])
    """

    def __init__(
        self, params: Any, backend: ferrodist.Backend | None = None, *, bucket_mib: float = 25
    ) -> None:
        self.backend = backend_of(backend, "DataParallel")
        self.num_rounds = 0
        self._sizes = _bucket_sizes(bucket_mib)
        named, rebuild = flatten(params, "DataParallel: params")
        self._slots = [_slot_of(path, leaf) for path, leaf in named]
        self._numbers = {path: number for number, (path, _) in enumerate(named)}
        # Of small arrays, so as not to keep the parameters themselves alive.
        self._rebuild = flatten(rebuild([slot.like.array for slot in self._slots]))[1]
        self.params = self.broadcast(params)
        self._reducer = self._make_reducer(widened=False)
        self._wide_reducer: Reducer | None = None  # made when it is needed
        self._own = [
            self._reducer.view(number).view(numpy_dtype(slot.dtype)).reshape(slot.shape)
            for number, slot in enumerate(self._slots)
        ]

    @property
    def gradients(self) -> Any:
        """The tree as NumPy arrays in the buckets' own memory.

        Fill them: ``average(parallel.gradients)`` averages them in place, without any copy.
        """
        return self._rebuild(list(self._own))

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Return the tree of rank ``root`` as new arrays, for example an optimizer's state."""
        return ferrodist.broadcast(tree, self.backend, root)

    def average(self, gradients: Any, *, weight: float | None = None) -> Any:
        """Return the mean over all ranks of every gradient; every rank calls it.

        The result has the structure of the parameters, with new arrays of the libraries that were
        passed; ``self.gradients`` are averaged in place instead. A leaf that is None or missing
        counts as zeros, and is None in the result if it is so on all ranks. ``weight``, for example
        this rank's number of samples, makes the mean a weighted one; gradients of a rank with
        weight 0 are ignored.
        """
        share = None if weight is None else _check_weight(weight, "DataParallel.average")
        given = self._take(gradients)
        reducer = self._reducer if share is None else self._reducer_for_weights()

        def fill(number: int) -> bool:
            taken = given.get(number)
            if taken is None or share == 0:
                reducer.view(number)[...] = 0
                return False
            if taken.array is not self._own[number] or reducer is not self._reducer:
                reducer.view(number)[...] = _numbers_in(taken.buffer)
            return True

        reducer.begin(share)
        used = reducer.finish(fill)
        self.num_rounds += 1
        if share is not None and self._slots and reducer.weight == 0:
            raise _refuse_no_weight("DataParallel.average")
        means = [
            self._give(number, given.get(number), reducer.view(number)) if number in used else None
            for number in range(len(self._slots))
        ]
        return self._rebuild(means)

    def check_replicas(self, tree: Any) -> None:
        """Raise on every rank if a tree is not the same on all, bit for bit; one collective."""
        named, rebuild = flatten(tree, "DataParallel.check_replicas: tree")
        hashes = [
            _hash(as_input(leaf, f"DataParallel.check_replicas: tree{p}")) for p, leaf in named
        ]
        everybodys = ferrodist.all_gather(rebuild(hashes), self.backend)
        for path, found in flatten(everybodys)[0]:
            if ranks := drifted_ranks(found):
                raise ferrodist.CollectiveMismatch(
                    f"DataParallel: the replicas have drifted apart: tree{path} of rank {ranks[0]} "
                    f"differs from the others' after {self.num_rounds} averages (differing ranks: "
                    f"{ranks}). Something changes it on that rank alone, or its hardware is at "
                    "fault",
                    rank=ranks[0],
                    this_rank=self.backend.rank,
                )

    # -- inside -----------------------------------------------------------------------------------

    def _make_reducer(self, *, widened: bool) -> Reducer:
        leaves = [slot.leaf(widened=widened) for slot in self._slots]
        return Reducer(
            leaves,
            self.backend,
            kind="numpy",
            owner="DataParallel",
            advice="every rank must call average() in every step, with weight=0 if it has no batch",
            sizes=self._sizes,
        )

    def _reducer_for_weights(self) -> Reducer:
        """Give buckets in which a gradient times a number of samples fits, and that number too."""
        if not any(slot.dtype.is_half for slot in self._slots):
            return self._reducer
        if self._wide_reducer is None:
            self._wide_reducer = self._make_reducer(widened=True)
        return self._wide_reducer

    def _take(self, gradients: Any) -> dict[int, InputArray]:
        """Take all gradients in, by number, before any of them is sent."""
        where = "DataParallel.average: gradients"
        given = {}
        for path, leaf in flatten(gradients, where)[0]:
            if path not in self._numbers:
                raise ferrodist.InvalidArgument(
                    f"{where}{path} has no place in the parameters, whose leaves are "
                    f"{_shorten(list(self._numbers))}; pass gradients of those parameters",
                    got=path,
                    this_rank=self.backend.rank,
                )
            number, taken = self._numbers[path], as_input(leaf, where + path)
            self._check_form(self._slots[number], taken.buffer, where + path)
            given[number] = taken
        return given

    def _check_form(self, slot: _Slot, found: Buffer, where: str) -> None:
        if (found.dtype, found.shape) != (slot.dtype, slot.shape):
            got = f"{found.dtype.label}{list(found.shape)}"
            raise ferrodist.InvalidArgument(
                f"{where} is {got}, but the parameter is {slot}; convert the gradient, or use "
                "average_gradients, which knows no parameters",
                got=got,
                expected=str(slot),
                this_rank=self.backend.rank,
            )

    def _give(self, number: int, given: InputArray | None, mean: Array) -> Any:
        """Make the result of a leaf, of the kind of its gradient, or else of its parameter."""
        slot, own = self._slots[number], self._own[number]
        if given is None or given.array is not own:
            return _array_like(given or slot.like, mean, slot.shape)
        if mean is not self._reducer.view(number):
            self._reducer.view(number)[...] = mean
        return own


# -- arrays ----------------------------------------------------------------------------------------


def _slot_of(path: str, leaf: Any) -> _Slot:
    taken = _take_float(leaf, f"DataParallel: params{path}")
    shape = taken.buffer.shape
    small = new_result(taken, (0,) if shape else ()).finish()
    return _Slot(path, taken.buffer.dtype, shape, as_input(small))


def _take_float(leaf: Any, where: str) -> InputArray:
    """Take in an array that has a mean of its own dtype."""
    taken = as_input(leaf, where)
    dtype = taken.buffer.dtype
    if not (dtype.is_float or dtype.is_complex):
        raise ferrodist.UnsupportedOp(
            f"{where} is {dtype.label}, whose mean would not be of that type; convert it to a "
            "float type, or keep it out of the tree",
            got=dtype.label,
        )
    return taken


def _numbers_in(buffer: Buffer) -> Array:
    """View the numbers of an array; complex ones are pairs, along one more axis."""
    dtype, shape = buffer.dtype, buffer.shape
    if dtype.is_complex:
        dtype, shape = _REAL_PARTS[dtype], (*shape, 2)
    return np.asarray(buffer.memory).view(numpy_dtype(dtype)).reshape(shape)


def _scale(buffer: Buffer, share: float) -> Array:
    """Multiply an array; one of 16 bits becomes float32, which has room for the product."""
    array = _numbers_in(buffer)
    if buffer.dtype.is_half:
        array = array.astype(np.float32)
    return np.asarray(array * share if share else np.zeros_like(array))


def _array_like(taken: InputArray, values: Any, shape: tuple[int, ...]) -> Any:
    """Make an array of the kind and dtype of another one."""
    result = new_result(taken, shape)
    _numbers_in(result.buffer)[...] = values
    return result.finish()


def _hash(taken: InputArray) -> Array:
    """Reduce an array, its dtype and its shape to one number."""
    hashed = hashlib.blake2b(taken.buffer.memory, digest_size=8)
    hashed.update(f"{taken.buffer.dtype.label}{taken.buffer.shape}".encode())
    return np.array([int.from_bytes(hashed.digest(), "little")], np.uint64)


# -- arguments -------------------------------------------------------------------------------------


def _check_weight(weight: Any, what: str) -> float:
    try:
        share = float(weight)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 <= share < math.inf:
        raise ferrodist.InvalidArgument(
            f"{what}: weight must be a number that is not negative, got {weight!r}", got=weight
        )
    return share


def _refuse_no_weight(what: str) -> ferrodist.InvalidArgument:
    return ferrodist.InvalidArgument(
        f"{what}: the weights of all ranks are 0, so there is no mean; skip the step on every "
        "rank, or give those that have samples a weight"
    )


def _bucket_sizes(bucket_mib: float) -> BucketSizes:
    if not bucket_mib > 0:
        raise ferrodist.InvalidArgument(
            f"DataParallel: bucket_mib must be more than 0, got {bucket_mib!r}", got=bucket_mib
        )
    size = int(bucket_mib * MIB)
    return BucketSizes(min(size, MIB), size)


def _shorten(paths: list[str]) -> str:
    shown = ", ".join(paths[:5]) or "none"
    return f"{shown}, ..." if len(paths) > 5 else shown
