# SPDX-License-Identifier: MIT OR Apache-2.0
"""What processes tell each other in words: calls, verdicts and departures as bytes and back.

Only facts cross, as JSON; nothing that is read runs code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ferrodist import errors
from ferrodist.backends.verdict import Departure, Verdict, died
from ferrodist.buffer import DType
from ferrodist.call import Call, Kind, Leaf
from ferrodist.reduce_op import ReduceOp

_VERDICT_NBYTES = 16 * 1024  # what there is room for in shared memory
_DEPARTURE_NBYTES = 2048


MismatchReport = tuple[type[errors.CollectiveMismatch], str]
"""A difference that one rank has found: the error it means, and what differs."""


class CallDescriptor(NamedTuple):
    """What one rank tells all when ranks differ: its call, and its mismatch report if any."""

    call: Call
    report: MismatchReport | None


def pack_descriptor(descriptor: CallDescriptor) -> bytes:
    """Lay out a rank's call descriptor."""
    call, report = descriptor
    facts = {
        "kind": call.kind,
        "leaves": [[x.path, x.dtype, x.shape] for x in call.leaves],
        "op": call.op,
        "root": call.root,
        "algorithm": call.algorithm,
        "reproducible": call.reproducible,
        "site": None if call.site is None else str(call.site),
        "pickle": call.pickle,
        "objection": None if report is None else [report[0].__name__, report[1]],
    }
    return json.dumps(facts).encode()


def unpack_descriptor(data: bytes) -> CallDescriptor:
    """Read a rank's call descriptor."""
    with _reading("what a rank says of its call"):
        return _descriptor_of(json.loads(data.decode()))


def _descriptor_of(facts: dict[str, Any]) -> CallDescriptor:
    leaves = tuple(Leaf(path, DType(code), tuple(shape)) for path, code, shape in facts["leaves"])
    call = Call(
        Kind(facts["kind"]),
        leaves,
        op=None if facts["op"] is None else ReduceOp(facts["op"]),
        root=facts["root"],
        algorithm=facts["algorithm"],
        reproducible=facts["reproducible"],
        site=facts["site"],
        pickle=facts["pickle"],
    )
    report = facts["objection"]
    return CallDescriptor(call, None if report is None else (_mismatch(report[0]), report[1]))


def _mismatch(name: str) -> type[errors.CollectiveMismatch]:
    found = {"CollectiveMismatch": errors.CollectiveMismatch, "SizeMismatch": errors.SizeMismatch}
    return found[name]


def pack_verdict(verdict: Verdict, members: Sequence[int]) -> bytes:
    """Lay out a final verdict, with the world ranks of the group that it is about."""
    facts = {name: value for name, value in verdict.facts.items() if _is_short(value)}
    head, tail = [verdict.error.__name__, verdict.sequence], [facts, list(members)]
    return _fitting(lambda text: [*head, text, *tail], verdict.text, _VERDICT_NBYTES)


def _is_short(value: Any) -> bool:
    """Tell whether a fact is worth its room; the text has everything anyway."""
    return len(json.dumps(value)) < _VERDICT_NBYTES // 16


def _fitting(record: Callable[[str], list[Any]], text: str, limit: int) -> bytes:
    """Lay out a record with as much of its text as there is room for."""
    data = json.dumps(record(text), ensure_ascii=False).encode(errors="replace")
    while len(data) > limit and text:
        text = text[: len(text) * 3 // 4]
        data = json.dumps(record(text), ensure_ascii=False).encode(errors="replace")
    return data


def unpack_verdict(data: bytes, members: Sequence[int]) -> Verdict:
    """Read a final verdict; one on another group speaks of ranks of that group."""
    with _reading("a verdict"):
        return _verdict_of(json.loads(data.decode()), members)


def _verdict_of(record: list[Any], members: Sequence[int]) -> Verdict:
    name, sequence, text, facts, its_members = record
    error = _ERRORS[name]
    if list(members) != its_members and facts.get("rank") is not None:
        world_rank, reason = its_members[facts["rank"]], facts.get("reason", text)
        if world_rank in members:
            facts["rank"] = list(members).index(world_rank)
            text = f"rank {facts['rank']} aborted the group: {reason}"
        else:
            text = f"rank {facts['rank']} of the parent group aborted it: {reason}"
            facts["rank"] = None
    return Verdict(error, sequence, text, facts)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Refuse words of another process that make no sense."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise errors.ProtocolError(
            f"{what} came in words that cannot be read; do all ranks run the same ferrodist?"
        ) from error


_ERRORS: dict[str, type[errors.DistributedError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DistributedError)
}


def pack_departure(departure: Departure) -> bytes:
    """Lay out how a rank left, cut to what there is room for."""
    return _fitting(lambda how: [how, departure.advice], departure.how, _DEPARTURE_NBYTES)


def unpack_departure(data: bytes) -> Departure:
    """Read how a rank left."""
    if not data:
        return died("dropped its backend without close()")
    try:
        how, advice = json.loads(data.decode())
        return Departure(str(how), str(advice))
    except (ValueError, TypeError, RecursionError):
        return died("left with words that cannot be read")
