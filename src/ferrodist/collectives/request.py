# SPDX-License-Identifier: MIT OR Apache-2.0
"""What all public calls begin with: how they show their options, and the checks of these.

First the root or peer, then the arrays, then the shapes; nothing is sent and no sequence number is
used before all of it has passed. Where others may wait in the call all the same, a rank refuses its
arguments in the call, and all raise its error.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

from ferrodist.arrays import InputArray, check_number
from ferrodist.backends import failures
from ferrodist.backends.base import Backend
from ferrodist.backends.call_methods import Op
from ferrodist.backends.registry import current_backend
from ferrodist.backends.running_call import CollectiveArgs, Prepared, RunningCall
from ferrodist.buffer import DType
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.config import DEFAULT
from ferrodist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    NotInitialized,
    OutOfMemory,
    UnsupportedArray,
    UnsupportedOp,
)
from ferrodist.profiler import profiled
from ferrodist.reduce_op import CustomOp, ReduceOp

_ABSENT: Any = object()
F = TypeVar("F", bound=Callable[..., Any])
Error = TypeVar("Error", bound=DistributedError)

# What torch, MPI and Horovod call the arguments of these calls.
_MEANT = {
    **dict.fromkeys(("group", "process_group", "comm", "process_set"), "backend"),
    **dict.fromkeys(("src", "dst", "root_rank", "rank"), "root"),
    "dest": "dst",
    "source": "src",
    "tensor": "x",
    "obj": "value",
    "object_list": "value",
}

# The arguments that calls share, for their docstrings.
_MEANINGS = {
    "backend": "The group; None is the backend that ``init`` made.",
    "root": "The rank, in the group, that the data comes from or goes to.",
    "op": "'sum', 'mean', 'prod', 'min', 'max', 'band', 'bor', 'bxor', 'land', 'lor', 'lxor', "
    "'minloc', 'maxloc', a ``ReduceOp``, or ``ReduceOp.custom(fn)``.",
    "tag": "Keeps conversations apart; messages of one tag stay in order.",
    "out": "Receives the result and is returned; writable, C-contiguous, of its dtype and shape.",
    "timeout": "Seconds, or a timedelta, for the whole call; None for no limit. By default "
    "``backend.timeout``.",
    "async_op": "Return a ``Work`` at once; its ``wait()`` returns the result.",
    "algorithm": "The name of a schedule, or a ``Schedule``; None lets ferrodist choose.",
    "reproducible": "Reduce in rank order: the same bits on every backend and for any size.",
    "pickle": "Also send what msgpack cannot, by pickle; on all ranks or on none.",
}

_DEFAULTS = {
    "pickle": None,
    "out": None,
    "timeout": DEFAULT,
    "async_op": False,
    "algorithm": None,
    "reproducible": None,
}


def public(options: Any = None) -> Callable[[F], F]:
    """Make a function a method of every backend, and show the options of both one by one.

    ``options`` is the TypedDict that its ``**options`` unpack. What else is variable is there to
    answer mistakes, and not shown.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        fixed = [
            p
            for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if options is not None:
            own = {p.name: p for p in fixed if p.name in _DEFAULTS}
            hints = options.__annotations__
            fixed = [p for p in fixed if p.name not in own]
            fixed += [
                own.get(name) or _parameter(name, default, hints[name])
                for name, default in _DEFAULTS.items()
                if name in own or name in hints
            ]
        function.__dict__["__signature__"] = signature.replace(parameters=fixed)
        function.__doc__ = _with_meanings(function.__doc__, [p.name for p in fixed])
        _attach(function, signature.replace(parameters=fixed))
        return function

    return decorate


def _with_meanings(doc: str | None, names: Sequence[str]) -> str | None:
    """Put what the shared arguments mean before the example of a docstring."""
    known = [name for name in _MEANINGS if name in names]
    if doc is None or not known:  # python -OO
        return doc
    lines = "".join(f"        {name}: {_MEANINGS[name]}\n" for name in known)
    head, example, rest = doc.partition("    Example:\n")
    return f"{head}    Args:\n{lines}\n{example}{rest}"


def _parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    words = getattr(hint, "__forward_arg__", hint)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=words
    )


def check_keywords(name: str, keywords: Mapping[str, Any]) -> None:
    """Refuse a keyword that a call does not have, with the one that was meant."""
    known = {*inspect.signature(getattr(Backend, name)).parameters} - {"self"}
    mistaken = next((keyword for keyword in keywords if keyword not in known), None)
    if mistaken is not None:
        meant = _MEANT.get(mistaken)
        advice = f"; here it is {meant}=" if meant in known or meant == "backend" else ""
        raise TypeError(f"{name}() got an unexpected keyword argument {mistaken!r}{advice}")


def _attach(function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give ``Backend`` a method of this function's name, signature and docstring."""
    place = list(signature.parameters).index("backend")
    method = _after_one(function) if place == 1 else _after(function, place)
    update_wrapper(method, function)
    method.__qualname__ = f"Backend.{function.__name__}"
    del method.__dict__["__wrapped__"]  # it has another signature
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [p for p in signature.parameters.values() if p.name != "backend"]
    method.__dict__["__signature__"] = signature.replace(parameters=[own, *rest])
    setattr(Backend, function.__name__, method)


def _after_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put the backend second; no argument is packed or cut out on the way, as calls are short."""

    def method(self: Backend, x: Any = _ABSENT, /, *args: Any, **options: Any) -> Any:
        if x is _ABSENT:  # it is named, or missing
            return function(*args, backend=self, **options)
        return function(x, self, *args, **options)

    return method


def _after(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def method(self: Backend, *args: Any, **options: Any) -> Any:
        if len(args) < place:  # what stands before ``backend`` is named, or missing
            return function(*args, backend=self, **options)
        return function(*args[:place], self, *args[place:], **options)

    return method


# -- requests --------------------------------------------------------------------------------------

# Short names for the typed signatures of the public functions.
Group = Backend | None


class Request:
    """One public call on its way to the backend.

    ``options`` are those keyword arguments of the call that most calls have.
    """

    def __init__(
        self,
        kind: Kind,
        backend: Backend | None,
        options: Mapping[str, Any],
        *,
        root: int | None = None,
        op: Op | None = None,
        is_async: bool = False,
    ) -> None:
        if options:
            check_keywords(kind.label, options)
        self.kind = kind
        self.backend = open_backend(backend, kind.label)
        self.root = None
        if kind.is_rooted:
            self.root = self.backend._check_rank(root, f"{kind.label}: root")
        self.deadline = self.backend._deadline(options.get("timeout", DEFAULT))
        self.op = ReduceOp.parse(op) if kind.is_reduction else None
        algorithm, reproducible = options.get("algorithm"), options.get("reproducible")
        self.reproducible = bool(
            self.backend.reproducible if reproducible is None else reproducible
        )
        # What its collectives are told, where they are not told otherwise.
        self.args = CollectiveArgs(
            self.op if isinstance(self.op, ReduceOp) else None,
            self.root or 0,
            algorithm=algorithm,
            in_order=self.reproducible,
        )
        self.algorithm_name = self.backend._check_algorithm(
            kind, algorithm, self.root or 0, self.reproducible
        )
        self.is_async = is_async or options.get("async_op", False)
        self.counts: list[int] | None = None  # rows of each rank, where all pass them
        self._check_kind(is_algorithm_named=algorithm is not None)

    def _check_kind(self, *, is_algorithm_named: bool) -> None:
        if self.op is None:
            return
        problem = problem_of_kind(self.kind, self.op, is_algorithm_named)
        if problem is not None:
            raise self.refusal(UnsupportedOp, f"{self.op.label} {problem}")

    def refusal(self, error: type[Error], text: str, **facts: Any) -> Error:
        """Make the error of a call that this rank refuses before anything is sent."""
        label, rank = self.kind.label, self.backend.rank
        return error(f"{label}: {text}", op=label, this_rank=rank, **facts)

    @property
    def is_root(self) -> bool:
        """True on the rank a rooted call is about."""
        return self.root == self.backend.rank

    @property
    def takes_pairs(self) -> bool:
        """True where values are reduced together with their indices."""
        return self.op is not None and self.op.takes_pairs

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
            counts=None if self.counts is None else tuple(self.counts),
        )

    def execute(self, prepared: Prepared[Any]) -> Any:
        """Hand the call to the backend: return its result, or its Work if it is asynchronous."""
        with profiled(f"ferrodist:{self.kind.label}"):
            return (self.backend._start if self.is_async else self.backend._perform)(prepared)

    def refuse(self, error: BaseException) -> Any:
        """Enter the call only to refuse it, because other ranks wait in it; all raise the error."""
        call = self.call(compared=())._replace(refused=reason_of(error), counts=None)
        return self.execute(Refused(call, self.deadline, error))

    def check_op(self, taken: InputArray, where: str) -> None:
        """Refuse a reduction that has no meaning for the dtype, and numbers that could wrap."""
        if self.op is None:
            return
        dtype = taken.buffer.dtype
        problem = problem_of_dtype(self.kind, self.op, dtype, taken.is_number)
        if problem is not None:
            text = f"{self.op.label} of {dtype.label} ({where}) {problem}"
            raise self.refusal(UnsupportedOp, text, got=dtype.label)
        if taken.is_number and isinstance(self.op, ReduceOp):
            check_number(taken, self.op, self.backend.world_size, f"{self.kind.label}: {where}")


def open_backend(backend: Backend | None, what: str) -> Backend:
    """Return the backend to use, or say what is wrong with it."""
    if backend is None:
        backend = current_backend()
    if backend is None:
        raise NotInitialized(f"{what}: call ferrodist.init() first, or pass a backend")
    if not isinstance(backend, Backend):
        raise InvalidArgument(
            f"{what}: backend must be a Backend, got {type(backend).__name__}"
            f"{_meant_instead(backend, what)}",
            got=backend,
        )
    if applying.backend is backend:
        raise InvalidArgument(f"{what}: called by a custom op, which must not communicate")
    backend._check_usable()
    return backend


def _meant_instead(backend: Any, what: str) -> str:
    """Guess what was meant by an argument that stands where the backend belongs."""
    kind = next((kind for kind in Kind if kind.label == what), None)
    if kind is not None and kind.is_reduction and isinstance(backend, (str, ReduceOp)):
        op = backend.label if isinstance(backend, ReduceOp) else backend
        return f"; the operation comes after it, or as {what}(x, op={op!r})"
    if kind is not None and kind.is_rooted and hasattr(backend, "__index__"):
        return f"; the root comes after it, or as {what}(x, root={backend})"
    if type(backend).__module__.startswith("torch."):
        return ", a group of torch; pass what init() or backend.split() gave"
    return ""


def leaf_of(taken: InputArray, path: str = "") -> Leaf:
    """Describe an array as ranks compare it."""
    return Leaf(path, taken.buffer.dtype, taken.buffer.shape)


class _Applying(threading.local):
    """The backend in whose call this thread runs a user's function: a further one never begins."""

    backend: Backend | None = None


applying = _Applying()


# -- which operations there are --------------------------------------------------------------------

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MINLOC, ReduceOp.MAXLOC)
_OF_PAIRS = (Kind.ALLREDUCE, Kind.REDUCE, Kind.SCAN)
_CUT = (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_UNEVEN)


def problem_of_kind(kind: Kind, op: ReduceOp | CustomOp, is_algorithm_named: bool) -> str | None:
    """Say why a call does not take an operation, whatever the array; None if it does."""
    if isinstance(op, CustomOp) and is_algorithm_named:
        return "is applied in rank order; omit algorithm="
    if op.takes_pairs and kind not in _OF_PAIRS:
        return "is an operation of allreduce, reduce and scan only"
    if isinstance(op, CustomOp) and kind in _CUT:
        return "needs whole arrays, and here they are cut; use allreduce and take a part"
    return None


def problem_of_dtype(
    kind: Kind, op: ReduceOp | CustomOp, dtype: DType, is_number: bool
) -> str | None:
    """Say why an operation has no meaning for a dtype; None if it has."""
    if op is ReduceOp.MEAN and kind.is_prefix:
        return "has no meaning here: every rank would divide by another number; use sum"
    if op is ReduceOp.MEAN and not (dtype.is_float or dtype.is_complex):
        advice = "pass float(x)" if is_number else "convert to a float type first, or use sum"
        return f"would not be of that type; {advice}"
    if op in _ORDERED and dtype.is_complex:
        return "is not defined: complex numbers have no order"
    if op in _BITWISE and (dtype.is_float or dtype.is_complex):
        return "is not defined: bit operations need integers or bool; use land, lor or lxor"
    return None


# -- what a rank refuses in a call -----------------------------------------------------------------
#
# Where other ranks may find the same arguments right, or do not look at them, they enter the call
# and wait. A rank that refuses enters it as well, with a fingerprint that no other call has, and
# sends its reason as part of its descriptor: all ranks raise it, and the group goes on.

_LONGEST = 10_000  # characters of a reason
_GROUP_GOES_ON = (InvalidArgument, UnsupportedArray, UnsupportedOp, OutOfMemory, CollectiveMismatch)


@dataclass(slots=True, eq=False, repr=False)
class Refused(Prepared[Any]):
    """A call that this rank makes only to refuse its own arguments."""

    error: BaseException

    def run(self, running: RunningCall) -> None:
        """Enter the call; it ends in a mismatch unless all ranks refuse it."""
        try:
            running.collective(Kind.BARRIER)
        except _GROUP_GOES_ON as error:
            if error.sequence != running.sequence:
                raise

    def finish(self) -> Any:
        """Raise what this rank refuses, also if another rank refuses something else."""
        raise self.error


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return the name of an error of ours, and its text; an object may raise any other."""
    if isinstance(error, DistributedError):
        return type(error).__name__, str(error)[:_LONGEST]
    return UnsupportedArray.__name__, failures.describe(error)[:_LONGEST]
