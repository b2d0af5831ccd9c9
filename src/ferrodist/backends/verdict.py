# SPDX-License-Identifier: MIT OR Apache-2.0
"""Verdicts: what all ranks are told when a call cannot succeed. Pure data and text, no waiting.

There is one verdict per sequence number. Every rank in the call raises an error made from it; a
final verdict also answers every later call of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ferrodist import errors
from ferrodist.call import Call, Kind, Site
from ferrodist.deadline import Deadline

_BARRED = "barred"  # the fact that those missing never entered the call; not for users
_FOLD_ROWS_ABOVE = 8  # larger worlds show runs of equal rows as one


class Verdict(NamedTuple):
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
        return self.error(self.text, sequence=sequence, this_rank=this_rank, **facts)

    def bars(self, rank: int) -> bool:
        """Tell whether a rank was barred from the call: it came too late."""
        return bool(self.facts.get(_BARRED)) and rank in (self.facts.get("missing") or ())

    def later(self, this_rank: int) -> errors.DistributedError:
        """Make the error of a call that comes after a final verdict."""
        if self.error in (errors.RankLost, errors.GroupAborted):
            return self.now(this_rank)
        text = f"the group was given up earlier: {self.text}"
        rank = self.facts.get("rank")
        return errors.GroupAborted(text, reason=self.text, rank=rank, this_rank=this_rank)


class Departure(NamedTuple):
    """How a rank left: a clause that completes 'rank 2 ...'."""

    how: str
    advice: str


def closed(after: int, site: Site) -> Departure:
    """Describe a rank that called close()."""
    return Departure(f"left after #{after} (closed at {site})", _SAME_NUMBER)


def closing() -> Departure:
    """Describe a rank that has called close() and waits for what it has in flight."""
    return Departure("is closing its backend", _SAME_NUMBER)


def ended(after: int, how: str) -> Departure:
    """Describe a rank whose program came to its end."""
    return Departure(f"left after #{after} ({how})", _SAME_NUMBER)


def raised(error: BaseException) -> Departure:
    """Describe a rank whose program raised; its last words are the error's."""
    return Departure(f"raised {words_of(error)}", "that error is the cause of this one")


def words_of(error: BaseException) -> str:
    """Name an error with its text, if it has one that can be had."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- somebody else's __str__; its failure must not hide the error
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def died(how: str) -> Departure:
    """Describe a rank that stopped without a word."""
    is_killed = "SIGKILL" in how
    return Departure(how, _WHO_KILLS if is_killed else "look at that rank's own output")


_WHO_KILLS = "the kernel does that when memory runs out (see dmesg), and so do job managers"
_SAME_NUMBER = "every rank must make the same number of calls"


def mismatch(sequence: int, calls: Sequence[Call | None]) -> Verdict:
    """Ranks called different things: the table of who called what and where."""
    present = [call for call in calls if call is not None]
    first = present[0]
    only_sizes = all(first.differs_only_in_size(call) for call in present)
    what = "sizes differ between ranks" if only_sizes else "ranks disagree"
    lines = [f"{first.kind.label} #{sequence}: {what}", *_table(calls)]
    leaf = _first_different_leaf(present)
    if leaf:
        lines.append(leaf)
    same_kind = all(call.kind is first.kind for call in present)
    lines.append(_advice(first, only_sizes, same_kind))
    facts = {"op": first.kind.label, "calls": [str(call) if call else None for call in calls]}
    error = errors.SizeMismatch if only_sizes else errors.CollectiveMismatch
    return Verdict(error, sequence, "\n".join(lines), facts, is_final=False)


def _advice(call: Call, only_sizes: bool, same_kind: bool) -> str:
    if not only_sizes and not same_kind:
        return "every rank must make the same calls in the same order"
    if not only_sizes:
        return "every rank must pass the same dtype, op, root and options"
    if call.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL):
        return f"every rank must pass the same shape; {call.kind.label}_uneven takes different ones"
    return "every rank must pass the same shape"


def reported_mismatch(
    sequence: int, calls: Sequence[Call], error: type[errors.CollectiveMismatch], text: str
) -> Verdict:
    """A rank found, on arrival, what the fingerprints leave out."""
    label = calls[0].kind.label
    lines = [f"{label} #{sequence}: {text}", *_table(calls)]
    return Verdict(error, sequence, "\n".join(lines), {"op": label}, is_final=False)


def timeout(
    call: Call,
    sequence: int,
    missing: Sequence[int],
    deadline: Deadline,
    last: Sequence[str],
    *,
    is_barred: bool = False,
) -> Verdict:
    """A deadline ran out: name who did not get through and what each was last seen doing.

    ``is_barred``: those missing never entered the call, and can no longer.
    """
    assert missing, "a deadline ran out, and nobody is missing"
    who = f"{names_of_ranks(missing)} did not get through within {deadline}"
    seen = "; ".join(last)
    text = (
        f"{call.kind.label} #{sequence}{_at(call)}: {who} ({seen}); find out what is in the way, "
        "or raise the limit with timeout=, backend.timeout or FERRODIST_TIMEOUT"
    )
    facts = {"op": call.kind.label, "missing": list(missing), "rank": missing[0]}
    if is_barred:
        facts[_BARRED] = True
    return Verdict(errors.CollectiveTimeout, sequence, text, facts)


def loss(call: Call, sequence: int, rank: int, departure: Departure) -> Verdict:
    """A rank is gone that this call still needs."""
    text = (
        f"{call.kind.label} #{sequence}{_at(call)}: rank {rank} {departure.how}; {departure.advice}"
    )
    return Verdict(
        errors.RankLost, sequence, text, {"op": call.kind.label, "rank": rank, "how": departure.how}
    )


def abort(rank: int | None, reason: str) -> Verdict:
    """A rank gave the group up; None if it was given up from outside."""
    text = f"rank {rank} aborted the group: {reason}" if rank is not None else reason
    return Verdict(errors.GroupAborted, 0, text, {"rank": rank, "reason": reason})


def corruption(call: Call, sequence: int, rank: int, reason: str) -> Verdict:
    """Bytes arrived that cannot be right."""
    text = (
        f"{call.kind.label} #{sequence}{_at(call)}: bytes from rank {rank} cannot be right "
        f"({reason}); nothing of them was used, check the link or the memory of that host"
    )
    return Verdict(
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
        if runs and runs[-1][1] == row and len(rows) > _FOLD_ROWS_ABOVE:
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
