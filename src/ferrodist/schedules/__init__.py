# SPDX-License-Identifier: MIT OR Apache-2.0
"""Schedules: collective algorithms as pure data, and what can be done with the data.

The rule of this package: nothing here sends, waits or touches memory. An algorithm is a generator
that yields the steps of one rank; from that one description it is proved right (``verify``), costed
(``predict``, ``simulate``), chosen (``choose``) and compiled for those who do send
(``compile_table``, ``layouts``). One family of algorithms per file; the words they are written in
are in ``steps.py``.

To write your own, say what one rank does, for every world, and have it proved. Here everybody sends
everybody the whole array and reduces all of them in rank order:

>>> def everybody_reduces(rank, world, root):
...     for distance in range(1, world):
...         above, below = (rank + distance) % world, (rank - distance) % world
...         yield Step(Send(above, (mine(0),)), Recv(below, (scratch(0, below),)))
...     inputs = tuple(mine(0) if peer == rank else scratch(0, peer) for peer in range(world))
...     yield Step(then=(reduce_or_copy(out(0), inputs),))
>>> schedule = Schedule("everybody_reduces", Kind.ALLREDUCE, everybody_reduces, chunks=one_chunk)
>>> facts = verify(schedule, world=5)
>>> facts.in_order, facts.rounds, facts.num_messages, str(facts.max_sent)
(True, 4, 20, '4')

A mistake is named. This rank 0 forgets the others:

>>> def forgetful(rank, world, root):
...     if rank != 0:
...         yield Step(send=Send(0, (mine(0),)))
...     yield keep_own(0)
>>> schedule = Schedule("forgetful", Kind.ALLREDUCE, forgetful, chunks=one_chunk)
>>> verify(schedule, world=3)  # doctest: +NORMALIZE_WHITESPACE
Traceback (most recent call last):
    ...
ferrodist.errors.InvalidArgument: schedule 'forgetful' at world 3: rank 1, step 0 sends
    mine(0) to rank 0, which never receives it
"""

from ferrodist.call import Kind
from ferrodist.schedules.cost import LINKS, Line, LinkModel, line, predict, simulate
from ferrodist.schedules.families import BUILT_IN, Traits, choose, find, known, traits
from ferrodist.schedules.steps import (
    Cell,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Space,
    Step,
    Steps,
    chunk_per_rank,
    keep_own,
    mine,
    one_chunk,
    out,
    reduce_or_copy,
    scratch,
)
from ferrodist.schedules.table import (
    NOBODY,
    Layout,
    Lengths,
    Row,
    Table,
    Work,
    compile_table,
    layouts,
)
from ferrodist.schedules.verify import Facts, verify

__all__ = [
    # the words of an algorithm
    "Cell", "Copy", "Kind", "Recv", "Reduce", "Schedule", "Send", "Space", "Step", "Steps",
    "chunk_per_rank", "keep_own", "mine", "one_chunk", "out", "reduce_or_copy", "scratch",
    # which there are, and what is true of them
    "BUILT_IN", "Facts", "Traits", "find", "known", "traits", "verify",
    # what they cost, and which to take
    "LINKS", "Line", "LinkModel", "choose", "line", "predict", "simulate",
    # how they are run
    "Layout", "Lengths", "NOBODY", "Row", "Table", "Work", "compile_table", "layouts",
]  # fmt: skip
