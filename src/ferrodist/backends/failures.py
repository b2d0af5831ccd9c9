# SPDX-License-Identifier: MIT OR Apache-2.0
"""What becomes of calls that fail: the status of a native call, and what all ranks are told.

There is one group error per sequence number. Every rank in the call raises an error made from it; a
final group error also answers every later call of the group. Pure data and text, no waiting.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist import errors
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveTimeout,
    InvalidArgument,
    OutOfMemory,
    ProtocolError,
    RankLost,
    SizeMismatch,
)

if TYPE_CHECKING:  # the launcher names ranks and their ends, too, and starts without NumPy
    from ferrodist.call import Call, Leaf
    from ferrodist.reduce_op import CustomOp, ReduceOp


class StatusCode(enum.IntEnum):
    """How a native call ended. The codes are those of native/core/wait.hpp."""

    DONE = 0
    MISMATCH = 1
    GROUP_ERROR = 2
    LATE = 3
    LOST = 4
    NO_HEARTBEAT = 5
    INTERRUPTED = 6
    CORRUPT = 7
    UNEXPECTED = 8
    GIVEN_UP = 9
    NO_MEMORY = 10
    OTHER_KIND = 11
    CANCELLED = 12


_BARRED = "barred"  # the fact that those missing never entered the call; not for users
_MERGE_ROWS_ABOVE = 8  # larger worlds show runs of equal rows as one


class GroupError(NamedTuple):
    """Why the call ``sequence`` fails: the error each rank in it raises."""

    error: type[errors.DistributedError]
    sequence: int
    text: str
    facts: dict[str, Any]
    is_final: bool = True

    def now(self, this_rank: int) -> errors.DistributedError:
        """Make the error of a rank in the call."""
        sequence = self.sequence or None  # zero stands for "whatever you are in"
        facts = {name: fact for name, fact in self.facts.items() if name != _BARRED}
        if self.evicts(this_rank):
            text = f"the others have given this rank up: {self.text}"
            return errors.Evicted(
                text, sequence=sequence, rank=this_rank, this_rank=this_rank, reason=self.text
            )
        return self.error(self.text, sequence=sequence, this_rank=this_rank, **facts)

    def bars(self, rank: int) -> bool:
        """Tell whether a rank was barred from the call: it came too late."""
        return bool(self.facts.get(_BARRED)) and rank in (self.facts.get("missing") or ())

    def evicts(self, rank: int) -> bool:
        """Tell whether it is this rank that the others have lost, though it is alive."""
        return self.error is errors.RankLost and self.facts.get("rank") == rank

    def later(self, this_rank: int) -> errors.DistributedError:
        """Make the error of a call that comes after a final group error."""
        if self.error in (errors.RankLost, errors.GroupAborted):
            return self.now(this_rank)
        text = f"the group was given up earlier: {self.text}"
        rank = self.facts.get("rank")
        return errors.GroupAborted(text, reason=self.text, rank=rank, this_rank=this_rank)


class LeaveReason(NamedTuple):
    """How a rank left: a clause that completes 'rank 2 ...'."""

    how: str
    advice: str

    @property
    def is_normal(self) -> bool:
        """Whether it closed, or came to its end, and did not die."""
        return self.advice == _SAME_NUMBER


def closing() -> LeaveReason:
    """Describe a rank that has called close() and waits for what it has in flight."""
    return LeaveReason("is closing its backend", _SAME_NUMBER)


def left(after: int, how: str) -> LeaveReason:
    """Describe a rank that called close(), or whose program came to its end."""
    return LeaveReason(f"left after #{after} ({how})", _SAME_NUMBER)


def raised(error: BaseException) -> LeaveReason:
    """Describe a rank whose program raised; its leave reason is the error."""
    return LeaveReason(f"raised {describe(error)}", "that error is the cause of this one")


def describe(error: BaseException) -> str:
    """Name an error with its text, if it has one that can be had."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- __str__ is the program's code; its failure must not hide the error
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def died(how: str) -> LeaveReason:
    """Describe a rank that stopped without a word."""
    if "SIGKILL" in how:
        return LeaveReason(how, _WHO_KILLS)
    if any(number.name in how for number in CRASHES):
        return LeaveReason(how, _WHERE_CRASHED)
    return LeaveReason(how, "look at that rank's own output")


_WHO_KILLS = "the kernel does that when memory runs out (see dmesg), and so do job managers"
_WHERE_CRASHED = "it crashed in native code, and PYTHONFAULTHANDLER=1 shows where"
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_SAME_LINES = (
    "every rank must make the same calls in the same order; FERRODIST_CHECK_SITES=1 compares their "
    "files and lines"
)
_SAME_NUMBER = "every rank must make the same number of calls"


def mismatch(
    sequence: int, calls: Sequence[Call | None], report: MismatchReport | None = None
) -> GroupError:
    """Ranks called different things: a table of what each rank called, and where.

    ``report`` is what a rank has found, on arrival, that fingerprints do not show.
    """
    for rank, call in enumerate(calls):
        if call is not None and call.refused is not None:
            return _refusal(sequence, rank, call.kind.label, *call.refused)
    present = [call for call in calls if call is not None]
    first = present[0]
    if report is not None:
        reported, text = report
        lines = [f"{first.kind.label} #{sequence}: {text}", *_table(calls)]
        facts: dict[str, Any] = {"op": first.kind.label}
        return GroupError(reported, sequence, "\n".join(lines), facts, is_final=False)
    only_sites = all(first.differs_only_in_site(call) for call in present)
    only_sizes = not only_sites and all(first.differs_only_in_size(call) for call in present)
    what = "sizes differ between ranks" if only_sizes else "ranks disagree"
    what = "ranks called from different lines" if only_sites else what
    lines = [f"{first.kind.label} #{sequence}: {what}", *_table(calls)]
    leaf = _first_different_leaf(present)
    if leaf:
        lines.append(leaf)
    same_kind = all(call.kind is first.kind for call in present)
    lines.append(_SAME_LINES if only_sites else _advice(first, only_sizes, same_kind))
    facts = {"op": first.kind.label, "calls": [str(call) if call else None for call in calls]}
    error = errors.SizeMismatch if only_sizes else errors.CollectiveMismatch
    return GroupError(error, sequence, "\n".join(lines), facts, is_final=False)


def _refusal(sequence: int, rank: int, op: str, name: str, text: str) -> GroupError:
    """A rank refuses its own arguments in a call on which the others wait."""
    where = f" (on rank {rank})"
    facts = {"op": op, "rank": rank}
    return GroupError(
        _ERRORS[name], sequence, text.removesuffix(where) + where, facts, is_final=False
    )


def _advice(call: Call, only_sizes: bool, same_kind: bool) -> str:
    if not only_sizes and not same_kind:
        return "every rank must make the same calls in the same order"
    if not only_sizes:
        return "every rank must pass the same dtype, op, root and options"
    if call.kind.label in ("all_gather", "all_to_all"):
        return f"every rank must pass the same shape; {call.kind.label}_uneven takes different ones"
    return "every rank must pass the same shape"


def timeout(
    call: Call,
    sequence: int,
    missing: Sequence[int],
    deadline: Deadline,
    last: Sequence[str],
    *,
    is_barred: bool = False,
) -> GroupError:
    """A deadline ran out: name the ranks that did not get through, and what each did last.

    ``is_barred``: those missing never entered the call, and can no longer.
    """
    assert missing, "a deadline ran out, and nobody is missing"
    who = f"{names_of_ranks(missing)} did not get through within {deadline}"
    seen = "; ".join(last)
    text = (
        f"{call.kind.label} #{sequence}{_at(call)}: {who} ({seen}); check what those "
        "ranks are doing, or raise the limit with timeout=, backend.timeout or FERRODIST_TIMEOUT"
    )
    facts = {"op": call.kind.label, "missing": list(missing), "rank": missing[0]}
    if is_barred:
        facts[_BARRED] = True
    return GroupError(errors.CollectiveTimeout, sequence, text, facts)


def split_timeout(what: str, absent: Sequence[int], deadline: Deadline, others: list[str]) -> str:
    """Say which ranks did not call split, and which of them wait in another split."""
    elsewhere = f" (waiting elsewhere: {', '.join(others)})" if others else ""
    return (
        f"{what}: {names_of_ranks(absent)} did not call it within {deadline}{elsewhere}; every "
        "member must, with the same list. the limit is timeout=, backend.timeout or "
        "FERRODIST_TIMEOUT"
    )


def lost_in_split(what: str, rank: int, this_rank: int, how: str | None) -> RankLost:
    """Make the error of a split whose member is gone."""
    how = how or GONE.how
    return RankLost(f"{what}: rank {rank} {how}", rank=rank, this_rank=this_rank, how=how)


def split_given_up(rank: int, error: BaseException, lost: int | None) -> GroupError:
    """A member has not got a group that others may have; ranks are those of that group.

    If it misses another member, that one is the ``lost`` one: the member itself is alive.
    """
    if lost is not None:
        how = getattr(error, "how", None) or GONE.how
        text = f"rank {lost} {how} while this group was being made"
        return GroupError(RankLost, 1, text, {"rank": lost, "how": how})
    reason = describe(error)
    text = f"rank {rank} gave this group up while it was being made: {reason}"
    return GroupError(errors.GroupAborted, 1, text, {"rank": rank, "reason": reason})


def loss(call: Call, sequence: int, rank: int, leave_reason: LeaveReason) -> GroupError:
    """A rank is gone that this call still needs."""
    where = f"{call.kind.label} #{sequence}{_at(call)}"
    text = f"{where}: rank {rank} {leave_reason.how}; {leave_reason.advice}"
    return GroupError(
        errors.RankLost,
        sequence,
        text,
        {"op": call.kind.label, "rank": rank, "how": leave_reason.how},
    )


def eviction(sequence: int, rank: int, how: str) -> GroupError:
    """A rank was lost in another group, and those left go on without it."""
    text = f"rank {rank} {how}, and the ranks left have gone on without it in another group"
    return GroupError(errors.RankLost, sequence, text, {"rank": rank, "how": how})


def abort(rank: int | None, reason: str) -> GroupError:
    """A rank gave the group up; None if it was given up from outside."""
    text = f"rank {rank} aborted the group: {reason}" if rank is not None else reason
    return GroupError(errors.GroupAborted, 0, text, {"rank": rank, "reason": reason})


def corruption(call: Call, sequence: int, rank: int, reason: str) -> GroupError:
    """Bytes arrived that cannot be right."""
    text = (
        f"{call.kind.label} #{sequence}{_at(call)}: bytes from rank {rank} cannot be right "
        f"({reason}); nothing of them was used, check the link or the memory of that host"
    )
    return GroupError(
        errors.ProtocolError,
        sequence,
        text,
        {"op": call.kind.label, "rank": rank, "reason": reason},
    )


def _at(call: Call) -> str:
    return f" ({call.site})" if call.site is not None else ""


def _table(calls: Sequence[Call | None]) -> list[str]:
    """Lay out one row per rank; in large worlds one row per run of equal calls."""
    rows = [(str(call), str(call.site)) if call else ("has not called yet", "") for call in calls]
    runs: list[tuple[list[int], tuple[str, str]]] = []
    for rank, row in enumerate(rows):
        if runs and runs[-1][1] == row and len(rows) > _MERGE_ROWS_ABOVE:
            runs[-1][0].append(rank)
        else:
            runs.append(([rank], row))
    names = [names_of_ranks(ranks) for ranks, _ in runs]
    wide, long = max(map(len, names)), max(len(row[0]) for _, row in runs)
    return [
        f"  {name:<{wide}}  {what:<{long}}  {site}".rstrip()
        for name, (_, (what, site)) in zip(names, runs, strict=True)
    ]


def _first_different_leaf(calls: Sequence[Call]) -> str | None:
    """Say which leaf of a tree differs first; a lone array needs no such line."""
    if not any(len(call.leaves) > 1 for call in calls) or len({call.kind for call in calls}) > 1:
        return None
    paths = sorted({leaf.path for call in calls for leaf in call.leaves})
    for path in paths:
        found = [next((str(x) for x in call.leaves if x.path == path), None) for call in calls]
        if len(set(found)) > 1:
            words = sorted({word or "absent" for word in found})
            return f"first difference at leaf {path}: {' against '.join(words)}"
    return None


def names_of_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as people do: 'rank 3', 'ranks 1, 4', 'ranks 0-2, 7'."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {words}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {words}"


# -- errors of point-to-point calls ----------------------------------------------------------------


GONE = died("is gone, and has not said why")
"""How a rank left of which nothing is known but that it cannot be reached."""


def timed_out(
    what: str, peers: Sequence[int], this_rank: int, deadline: Deadline, tags: Sequence[int]
) -> CollectiveTimeout:
    """Make the error of a wait that took too long, for one rank or for any of several."""
    is_one = len(peers) == 1
    who = (
        f"rank {peers[0]} did not answer"
        if is_one
        else f"none of {names_of_ranks(peers)} sent anything"
    )
    text = (
        f"{what}: {who} within {deadline}{_other_tags(tags)}; look at "
        f"{'that rank' if is_one else 'those ranks'}, or raise the limit with timeout=, "
        "backend.timeout or FERRODIST_TIMEOUT"
    )
    rank = peers[0] if is_one else None
    return CollectiveTimeout(text, missing=list(peers), rank=rank, this_rank=this_rank)


def lost(
    what: str, peer: int, this_rank: int, leave_reason: LeaveReason, tags: Sequence[int]
) -> RankLost:
    """Make the error of a peer that is gone, or takes or sends nothing more."""
    text = f"{what}: rank {peer} {leave_reason.how}{_other_tags(tags)}"
    return RankLost(text, rank=peer, this_rank=this_rank, how=leave_reason.how)


def lost_all(
    what: str, peer: int, this_rank: int, leave_reason: LeaveReason, tags: Sequence[int]
) -> RankLost:
    """Make the error of a receive from any rank when all other ranks have left."""
    text = (
        f"{what}: all other ranks have left, the last of them rank {peer}, which "
        f"{leave_reason.how}{_other_tags(tags)}"
    )
    return RankLost(text, rank=peer, this_rank=this_rank, how=leave_reason.how)


def other_kind(what: str, peer: int, this_rank: int, *, is_object: bool) -> InvalidArgument:
    """Make the error of a receive whose message is an object, or is none; it stays."""
    found, call = ("an object", "recv_object") if is_object else ("an array", "recv")
    text = f"{what}: the next message of rank {peer} is {found}; receive it with {call}"
    return InvalidArgument(text, rank=peer, this_rank=this_rank, got=found)


def damaged(what: str, peer: int, this_rank: int, reason: str) -> ProtocolError:
    """Make the error of bytes that cannot be right."""
    text = f"{what}: bytes from rank {peer} cannot be right ({reason})"
    return ProtocolError(text, rank=peer, this_rank=this_rank, reason=reason)


def no_memory(what: str, peer: int, this_rank: int) -> OutOfMemory:
    """Make the error of a message that its receiver, or its sender, had no memory for."""
    text = (
        f"{what}: no memory for a message with rank {peer}, here or there; messages that nobody "
        "receives fill it, up to FERRODIST_UNEXPECTED_NBYTES for each rank"
    )
    return OutOfMemory(text, rank=peer, this_rank=this_rank)


def nested(kind: int, outer: int, this_rank: int) -> errors.InvalidArgument:
    """Make the error of a call inside another one of its group, on the same thread."""
    from ferrodist.call import Kind

    name = Kind(kind).label
    return errors.InvalidArgument(
        f"{name}: made or waited for inside call #{outer} of the same group, by a signal handler "
        "or an operation of your own, so each of the two would wait for the other; set a flag "
        f"there, and call {name} when #{outer} has returned",
        this_rank=this_rank,
    )


def no_thread(why: object) -> errors.DistributedError:
    """Make the error of a call in flight that needs a thread, when none can be started."""
    return errors.DistributedError(
        f"no thread can be started for calls in flight ({why}): this process, its user or its "
        "cgroup has as many as it may have (ulimit -u, pids.max), or no memory for one more "
        "(ulimit -v); make the call without async_op=True, or raise the limit"
    )


def send_cycle(what: str, peer: int, this_rank: int, ranks: Sequence[int]) -> CollectiveTimeout:
    """Make the error of large sends that wait for each other."""
    path = " -> ".join(map(str, [*ranks, ranks[0]]))
    text = f"{what}: ranks {path} all send and none receives; use sendrecv"
    return CollectiveTimeout(text, missing=[peer], rank=peer, this_rank=this_rank)


def unexpected(what: str, peer: int, this_rank: int, found: Leaf, expected: Leaf) -> SizeMismatch:
    """Make the error of a message that is not what its receiver expects."""
    return SizeMismatch(
        f"{what}: rank {peer} sent {found}, this rank expected {expected}; the message was dropped",
        rank=peer,
        this_rank=this_rank,
        expected=str(expected),
        got=str(found),
    )


def _other_tags(tags: Sequence[int]) -> str:
    return f" (what it sent has other tags: {list(tags)})" if tags else ""


# -- as bytes: what processes tell each other ------------------------------------------------------


def pack_json(record: Any) -> bytes:
    """Lay out a record; what cannot be encoded of a text is replaced."""
    import json  # only calls that fail need it

    return json.dumps(record, ensure_ascii=False).encode(errors="replace")


def unpack_json(data: bytes | bytearray) -> Any:
    """Read a record back."""
    import json

    return json.loads(data.decode())


_GROUP_ERROR_NBYTES = 16 * 1024  # what there is room for in shared memory
_LEAVE_REASON_NBYTES = 2048


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
        "op": call.op if isinstance(call.op, int | None) else call.op.name,
        "root": call.root,
        "algorithm": call.algorithm,
        "reproducible": call.reproducible,
        "site": None if call.site is None else str(call.site),
        "pickle": call.pickle,
        "counts": call.counts,
        "refused": call.refused,
        "mismatch": None if report is None else [report[0].__name__, report[1]],
    }
    return pack_json(facts)


def unpack_descriptor(data: bytes) -> CallDescriptor:
    """Read a rank's call descriptor."""
    with _reading("what a rank says of its call"):
        return _descriptor_of(unpack_json(data))


def _descriptor_of(facts: dict[str, Any]) -> CallDescriptor:
    from ferrodist.buffer import DType
    from ferrodist.call import Call, Kind, Leaf

    leaves = tuple(Leaf(path, DType(code), tuple(shape)) for path, code, shape in facts["leaves"])
    call = Call(
        Kind(facts["kind"]),
        leaves,
        op=_read_op(facts["op"]),
        root=facts["root"],
        algorithm=facts["algorithm"],
        reproducible=facts["reproducible"],
        site=facts["site"],
        pickle=facts["pickle"],
        counts=None if facts["counts"] is None else tuple(facts["counts"]),
        refused=None if facts["refused"] is None else _read_refusal(*facts["refused"]),
    )
    report = facts["mismatch"]
    return CallDescriptor(call, None if report is None else (_mismatch(report[0]), report[1]))


def _read_op(op: int | str | None) -> ReduceOp | CustomOp | None:
    from ferrodist.reduce_op import CustomOp, ReduceOp

    if op is None:
        return None
    return CustomOp(op) if isinstance(op, str) else ReduceOp(op)


def _read_refusal(name: str, text: str) -> tuple[str, str]:
    return _ERRORS[name].__name__, str(text)


def _mismatch(name: str) -> type[errors.CollectiveMismatch]:
    found = {"CollectiveMismatch": errors.CollectiveMismatch, "SizeMismatch": errors.SizeMismatch}
    return found[name]


def pack_group_error(group_error: GroupError, members: Sequence[int]) -> bytes:
    """Lay out a final group error, with the world ranks of the group that it is about."""
    facts = {name: value for name, value in group_error.facts.items() if _is_short(value)}
    head, tail = [group_error.error.__name__, group_error.sequence], [facts, list(members)]
    return _fitting(lambda text: [*head, text, *tail], group_error.text, _GROUP_ERROR_NBYTES)


def _is_short(value: Any) -> bool:
    """Tell whether a fact is worth its room; the text has everything anyway."""
    return len(pack_json(value)) < _GROUP_ERROR_NBYTES // 16


def _fitting(record: Callable[[str], list[Any]], text: str, limit: int) -> bytes:
    """Lay out a record with as much of its text as there is room for."""
    data = pack_json(record(text))
    while len(data) > limit and text:
        text = text[: len(text) * 3 // 4]
        data = pack_json(record(text))
    return data


def unpack_group_error(data: bytes, members: Sequence[int]) -> GroupError:
    """Read a final group error; one of another group speaks of ranks of that group."""
    with _reading("a group error"):
        return _error_of(unpack_json(data), members)


def _error_of(record: list[Any], members: Sequence[int]) -> GroupError:
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
    return GroupError(error, sequence, text, facts)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Refuse bytes of another process that make no sense."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise errors.ProtocolError(
            f"{what} could not be decoded; do all ranks run the same ferrodist?"
        ) from error


_ERRORS: dict[str, type[errors.DistributedError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DistributedError)
}


def pack_leave_reason(leave_reason: LeaveReason) -> bytes:
    """Lay out how a rank left, cut to what there is room for."""
    return _fitting(lambda how: [how, leave_reason.advice], leave_reason.how, _LEAVE_REASON_NBYTES)


def unpack_leave_reason(data: bytes) -> LeaveReason:
    """Read how a rank left."""
    if not data:
        return died("dropped its backend without close()")
    try:
        how, advice = unpack_json(data)
        return LeaveReason(str(how), str(advice))
    except (ValueError, TypeError, RecursionError):
        return died("left a reason that could not be decoded")
