# SPDX-License-Identifier: MIT OR Apache-2.0
"""What every public call begins with: check the options, in the order SEMANTICS asks for.

First the root or peer, then the arrays, then the shapes; nothing is sent and no sequence number is
used before all of it has passed.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ferrodist.arrays import Taken, check_number
from ferrodist.backends.base import Backend
from ferrodist.backends.default import current_backend
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, Prepared
from ferrodist.buffer import DType
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.config import DEFAULT, Timeout, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, NotInitialized, UnsupportedOp
from ferrodist.reduce_op import ReduceOp

# Short names for the typed signatures of the public functions.
Group = Backend | None
Op = ReduceOp | str
Yes = Literal[True]
No = Literal[False]


class Options(TypedDict, total=False):
    """The keyword arguments that most collectives share, for their typed signatures."""

    out: Any
    timeout: Timeout
    algorithm: Algorithm
    reproducible: bool | None


class Request:
    """One public call on its way to the backend."""

    def __init__(
        self,
        kind: Kind,
        backend: Backend | None,
        *,
        root: int | None = None,
        op: ReduceOp | str | None = None,
        timeout: Timeout = DEFAULT,
        is_async: bool = False,
        algorithm: Algorithm = None,
        reproducible: bool | None = None,
    ) -> None:
        self.kind = kind
        self.backend = open_backend(backend, kind.label)
        self.root = None
        if kind.is_rooted:
            self.root = self.backend._check_rank(root, f"{kind.label}: root")
        self.deadline = open_deadline(self.backend, timeout)
        self.op = None if op is None else ReduceOp.parse(op)
        self.reproducible = (
            self.backend.reproducible if reproducible is None else bool(reproducible)
        )
        # What its collectives are told, where they are not told otherwise.
        self.args = CollectiveArgs(
            self.op, self.root or 0, algorithm=algorithm, in_order=self.reproducible
        )
        self.algorithm_name = self.backend._check_algorithm(
            kind, algorithm, self.root or 0, self.reproducible
        )
        self.is_async = is_async

    @property
    def is_root(self) -> bool:
        """True on the rank a rooted call is about."""
        return self.root == self.backend.rank

    def call(
        self,
        leaves: tuple[Leaf, ...] = (),
        *,
        compared: tuple[Leaf, ...] | None = None,
        pickle: bool = False,
    ) -> Call:
        """Describe the call as ranks compare it."""
        return Call(
            self.kind,
            leaves,
            op=self.op,
            root=self.root,
            algorithm=self.algorithm_name,
            reproducible=self.reproducible,
            site=caller_site(),
            compared=compared,
            pickle=pickle,
        )

    def execute(self, prepared: Prepared[Any]) -> Any:
        """Hand the call to the backend: return its result, or its Work if it is asynchronous."""
        return (self.backend._start if self.is_async else self.backend._perform)(prepared)

    def check_op(self, taken: Taken, where: str) -> None:
        """Refuse a reduction that has no meaning for the dtype, and numbers that could wrap."""
        if self.op is None:
            return
        dtype = taken.buffer.dtype
        problem = _problem(self.op, dtype, taken.is_number)
        if problem is not None:
            raise UnsupportedOp(
                f"{self.kind.label}: {self.op.name.lower()} of {dtype.label} ({where}) {problem}",
                op=self.kind.label,
                got=dtype.label,
                this_rank=self.backend.rank,
            )
        if taken.is_number:
            check_number(taken, self.op, self.backend.world_size, f"{self.kind.label}: {where}")


def open_backend(backend: Backend | None, what: str) -> Backend:
    """Return the backend to use, or say what is wrong with it."""
    if backend is None:
        backend = current_backend()
    if backend is None:
        raise NotInitialized(f"{what}: call ferrodist.init() first, or pass a backend")
    if not isinstance(backend, Backend):
        raise InvalidArgument(
            f"{what}: backend must be a Backend, got {type(backend).__name__}", got=backend
        )
    backend._check_usable()
    return backend


def open_deadline(backend: Backend, timeout: Timeout) -> Deadline:
    """Start the clock of a call."""
    return Deadline(backend.timeout if timeout is DEFAULT else check_timeout(timeout))


_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def _problem(op: ReduceOp, dtype: DType, is_number: bool) -> str | None:
    """Say why an operation cannot be done; None if it can."""
    if op is ReduceOp.MEAN and not (dtype.is_float or dtype.is_complex):
        advice = "pass float(x)" if is_number else "convert to a float type first, or use sum"
        return f"would not be of that type; {advice}"
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        return "is not defined: complex numbers have no order"
    if op in _BITWISE and (dtype.is_float or dtype.is_complex):
        return "is not defined: bit operations need integers or bool"
    return None


def leaf_of(taken: Taken, path: str = "") -> Leaf:
    """Describe an array as ranks compare it."""
    return Leaf(path, taken.buffer.dtype, taken.buffer.shape)
