# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables and layouts: compiled schedules, run on real memory, give the right numbers."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

import ferrodist
from ferrodist import Config
from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules import (
    BUILT_IN,
    NOBODY,
    Cell,
    Layout,
    Lengths,
    Recv,
    Reduce,
    Row,
    Schedule,
    Send,
    Space,
    Step,
    Table,
    Work,
    compile_table,
    find,
    layouts,
    mine,
    out,
    scratch,
    verify,
)
from ferrodist.schedules.steps import Copy
from ferrodist.schedules.table import num_segments, part
from ferrodist.testing import run_ranks

ITEMSIZE = 8
WHOLE = 1 << 40  # a segment that no array reaches

each_schedule = pytest.mark.parametrize(
    "schedule", BUILT_IN, ids=[f"{schedule.kind.label}-{schedule.name}" for schedule in BUILT_IN]
)

# An executor for tests: all ranks in one thread, each a generator that yields while it waits.

Mailboxes = dict[tuple[int, int], deque[list[bytes]]]
Memory = dict[Space, memoryview]


def execute(
    table: Table, segments: list[Layout], memory: Memory, mail: Mailboxes
) -> Iterator[None]:
    for layout in segments:

        def view(cell: int, layout: Layout = layout) -> memoryview:
            begin, end = layout.ranges[cell]
            return memory[table.cells[cell].space][begin:end]

        for row in table.rows:
            if row.send_to != NOBODY:
                mail[table.rank, row.send_to].append([bytes(view(cell)) for cell in row.sent])
            if row.recv_from != NOBODY:
                while not mail[row.recv_from, table.rank]:
                    yield
                parts = mail[row.recv_from, table.rank].popleft()
                for cell, content in zip(row.received, parts, strict=True):
                    view(cell)[:] = content
            for work in row.works:
                columns = [view(cell).cast("q").tolist() for cell in work.operands]
                reduced = array("q", map(sum, zip(*columns, strict=True)))
                view(work.into)[:] = reduced.tobytes()


class Job:
    """One collective of all ranks, from inputs to results."""

    def __init__(self, schedule: Schedule, world: int, root: int, chunk_nbytes: int) -> None:
        self.schedule, self.world, self.root = schedule, world, root
        self.chunk_nbytes = chunk_nbytes
        self.tables = [compile_table(schedule, world, rank, root) for rank in range(world)]

    def run(
        self,
        inputs: list[list[int]],
        lengths: list[Lengths],
        out_counts: list[int],
        in_place: bool = False,
    ) -> list[list[int]]:
        mail: Mailboxes = defaultdict(deque)
        memories, executors = [], []
        for rank, table in enumerate(self.tables):
            segments = list(layouts(table, lengths[rank], ITEMSIZE, chunk_nbytes=self.chunk_nbytes))
            memory = self.memory(rank, inputs[rank], out_counts[rank], in_place)
            scratch_nbytes = max(layout.scratch_nbytes for layout in segments)
            memory[Space.SCRATCH] = memoryview(bytearray(b"\x7f" * scratch_nbytes))
            memories.append(memory)
            executors.append(execute(table, segments, memory, mail))
        finish(executors)
        assert not any(mail.values())
        return [memory[Space.OUT].cast("q").tolist() for memory in memories]

    def memory(self, rank: int, values: list[int], out_count: int, in_place: bool) -> Memory:
        given = memoryview(bytearray(array("q", values).tobytes()))
        result = memoryview(bytearray(b"\x7f" * (out_count * ITEMSIZE)))
        if in_place and out_count and len(values):
            # The smaller one is part ``rank`` of the larger one, or they are one array.
            small, large = sorted((given, result), key=len)
            begin = rank * len(small) if len(small) < len(large) else 0
            if given is small:
                large[begin : begin + len(small)] = given
                given = large[begin : begin + len(small)]
            else:
                result = large[begin : begin + len(small)]
        return {Space.MINE: given, Space.OUT: result}


def finish(executors: list[Iterator[None]]) -> None:
    waiting = list(executors)
    for _ in range(1_000_000):
        waiting = [executor for executor in waiting if next(executor, "done") is None]
        if not waiting:
            return
    pytest.fail("the ranks wait for each other")


def example(
    kind: Kind, world: int, root: int, block: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return inputs and expected results of all ranks; the whole array is about world * block."""
    count = block * world
    whole = [[1000 * rank + index for index in range(count)] for rank in range(world)]
    if not kind.is_cut_by_rank:  # chunks need not be of equal size
        whole = [[*values, -rank] if block else values for rank, values in enumerate(whole)]
    blocks = [[values[i * block : (i + 1) * block] for i in range(world)] for values in whole]
    total = [sum(column) for column in zip(*whole, strict=True)]
    joined = [value for rank in range(world) for value in blocks[rank][rank]]
    on_root = [rank == root for rank in range(world)]
    nothing: list[list[int]] = [[] for _ in range(world)]
    prefixes = [[sum(column) for column in zip(*whole[: r + 1], strict=True)] for r in range(world)]
    own = [blocks[rank][rank] for rank in range(world)]
    return {
        Kind.ALLREDUCE: (whole, [total] * world),
        Kind.BROADCAST: (whole, [whole[root]] * world),
        Kind.REDUCE: (whole, [total if here else [] for here in on_root]),
        Kind.ALL_GATHER: (own, [joined] * world),
        Kind.GATHER: (own, [joined if here else [] for here in on_root]),
        Kind.SCATTER: (
            [whole[root] if here else [] for here in on_root],
            [blocks[root][rank] for rank in range(world)],
        ),
        Kind.REDUCE_SCATTER: (
            whole,
            [total[rank * block : (rank + 1) * block] for rank in range(world)],
        ),
        Kind.ALL_TO_ALL: (
            whole,
            [[v for source in range(world) for v in blocks[source][r]] for r in range(world)],
        ),
        Kind.BARRIER: (nothing, nothing),
        Kind.SCAN: (whole, prefixes),
        Kind.EXSCAN: (whole, [[], *prefixes[:-1]]),
    }[kind]


@each_schedule
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunk_nbytes", [WHOLE, 100])
def test_table_run_on_memory_gives_the_right_numbers(
    schedule: Schedule, world: int, chunk_nbytes: int
) -> None:
    root = world // 2
    for block, in_place in product((0, 1, 7), {False, bool(schedule.alias_safe)}):
        inputs, expected = example(schedule.kind, world, root, block)
        count = max(len(values) for values in inputs + expected)
        results = Job(schedule, world, root, chunk_nbytes).run(
            inputs, [Lengths(count)] * world, [len(values) for values in expected], in_place
        )
        assert results == expected


def test_blocks_of_different_lengths_are_gathered() -> None:
    world, blocks = 4, (3, 0, 5, 1)
    inputs = [[10 * rank + index for index in range(blocks[rank])] for rank in range(world)]
    joined = [value for values in inputs for value in values]
    for name in ("ring", "bruck", "direct", "star"):
        job = Job(find(Kind.ALL_GATHER, name), world, 0, WHOLE)
        assert job.run(inputs, [Lengths(9, blocks)] * world, [9] * world) == [joined] * world


def test_pairs_of_different_lengths_are_exchanged() -> None:
    world = 3
    sent = [[(rank * 2 + peer) % 4 for peer in range(world)] for rank in range(world)]
    inputs = [
        [100 * rank + 10 * peer + i for peer in range(world) for i in range(sent[rank][peer])]
        for rank in range(world)
    ]
    received = [[sent[peer][rank] for peer in range(world)] for rank in range(world)]
    expected = [
        [100 * peer + 10 * rank + i for peer in range(world) for i in range(sent[peer][rank])]
        for rank in range(world)
    ]
    lengths = [
        Lengths(sum(sent[rank]), tuple(sent[rank]), tuple(received[rank])) for rank in range(world)
    ]
    job = Job(find(Kind.ALL_TO_ALL, "pairwise"), world, 0, WHOLE)
    assert job.run(inputs, lengths, [sum(counts) for counts in received]) == expected


@each_schedule
@pytest.mark.parametrize("count", [0, 6, 24, 25 * 24])
def test_cells_of_all_segments_tile_the_result(schedule: Schedule, count: int) -> None:
    world = 6
    for rank in range(world):
        table = compile_table(schedule, world, rank)
        ranges = sorted(
            layout.ranges[cell]
            for layout in layouts(table, Lengths(count), ITEMSIZE, chunk_nbytes=160)
            for cell, name in enumerate(table.cells)
            if name.space is Space.OUT
        )
        ends = [0, *(end for _, end in ranges)]
        assert [begin for begin, _ in ranges] == ends[:-1]
        has_result = rank == 0 or schedule.kind not in (Kind.REDUCE, Kind.GATHER)
        has_result = has_result and (rank > 0 or schedule.kind is not Kind.EXSCAN)
        alone = schedule.kind in (Kind.SCATTER, Kind.REDUCE_SCATTER)
        if has_result and schedule.kind is not Kind.BARRIER:
            assert ends[-1] == count * ITEMSIZE // (world if alone else 1)


@pytest.mark.parametrize(("count", "chunks"), [(0, 3), (2, 5), (10, 3), (12, 4), (7, 7)])
def test_chunks_tile_the_array_and_differ_by_at_most_one(count: int, chunks: int) -> None:
    spans = [part(count, index, chunks) for index in range(chunks)]
    sizes = [end - begin for begin, end in spans]
    assert [begin for begin, _ in spans] == [0, *accumulate(sizes)][:-1]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 1000])
@pytest.mark.parametrize("most", [1, 6, 7, 100])
def test_segments_are_as_few_as_their_size_allows(count: int, most: int) -> None:
    segments = num_segments(Kind.ALLREDUCE, 4, Lengths(count), most)
    assert segments == max(1, -(-count // most))
    sizes = [end - begin for begin, end in (part(count, i, segments) for i in range(segments))]
    assert max(sizes) <= most


def test_segments_of_blocks_count_all_blocks_together() -> None:
    assert num_segments(Kind.REDUCE_SCATTER, 4, Lengths(400), 100) == 4
    assert num_segments(Kind.GATHER, 2, Lengths(10, (1, 9)), 6) == 3
    assert num_segments(Kind.REDUCE_SCATTER, 8, Lengths(80), 1) == 10


def test_kinds_without_scratch_are_not_segmented() -> None:
    for kind in (Kind.BROADCAST, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BARRIER):
        assert num_segments(kind, 4, Lengths(1000), 1) == 1


def test_empty_array_has_one_segment_of_empty_cells() -> None:
    for schedule in BUILT_IN:
        table = compile_table(schedule, 4, 1)
        (layout,) = layouts(table, Lengths(0), ITEMSIZE, chunk_nbytes=64)
        assert all(begin == end for begin, end in layout.ranges)
        assert layout.scratch_nbytes == 0


@pytest.mark.parametrize("world", [2, 5, 8])
def test_scratch_is_bounded_by_the_segment_whatever_the_array(world: int) -> None:
    for schedule in BUILT_IN:
        for rank in range(world):
            table = compile_table(schedule, world, rank)
            for layout in layouts(table, Lengths(world * 10_000), 4, chunk_nbytes=4096):
                assert layout.scratch_nbytes <= world * (4096 + 64 * world)


def test_scratch_cells_that_are_never_in_use_together_share_an_area() -> None:
    assert compile_table(find(Kind.ALLREDUCE, "ring"), 8, 3).num_areas == 1
    assert compile_table(find(Kind.REDUCE_SCATTER, "ring"), 8, 3).num_areas == 2
    assert compile_table(find(Kind.ALLREDUCE, "direct"), 8, 3).num_areas == 7
    assert compile_table(find(Kind.ALLREDUCE, "recursive_doubling"), 8, 3).num_areas == 1
    assert compile_table(find(Kind.BROADCAST, "tree"), 8, 3).num_areas == 0


@each_schedule
def test_cells_of_one_area_are_never_in_use_together(schedule: Schedule) -> None:
    for rank in range(7):
        table = compile_table(schedule, 7, rank)
        used: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(table.rows):
            works = [cell for work in row.works for cell in (work.into, *work.operands)]
            for cell in (*row.sent, *row.received, *works):
                used[cell].append(index)
        spans = [(area, used[cell][0], used[cell][-1]) for cell, area in enumerate(table.areas)]
        spans = sorted(span for span in spans if span[0] >= 0)
        for (area, _, last), (next_area, first, _) in pairwise(spans):
            assert area != next_area or last < first


def read_table(ints: array[int]) -> Table:
    """Read back what ``to_ints`` wrote, as the native executor does."""
    source = iter(ints)

    def read_list() -> tuple[int, ...]:
        return tuple(next(source) for _ in range(next(source)))

    def read_row() -> Row:
        return Row(
            send_to=next(source),
            sent=read_list(),
            recv_from=next(source),
            received=read_list(),
            works=tuple(Work(next(source), read_list()) for _ in range(next(source))),
            is_piecewise=bool(next(source)),
            is_entangled=bool(next(source)),
        )

    kind, world, rank, root, num_chunks, num_areas = (next(source) for _ in range(6))
    cells, areas = [], []
    for _ in range(next(source)):
        cells.append(Cell(Space(next(source)), next(source), next(source)))
        areas.append(next(source))
    rows = tuple(read_row() for _ in range(next(source)))
    head = (Kind(kind), world, rank, root, num_chunks, num_areas)
    return Table(*head, tuple(cells), tuple(areas), rows)


@each_schedule
def test_table_survives_the_way_through_integers(schedule: Schedule) -> None:
    for world, rank, root in ((1, 0, 0), (5, 3, 2), (8, 0, 7)):
        table = compile_table(schedule, world, rank, root)
        ints = table.to_ints()
        again = read_table(ints)
        assert ints.itemsize == 4
        assert again.to_ints() == ints
        assert (again.kind, again.world, again.rank, again.root) == (
            schedule.kind,
            world,
            rank,
            root,
        )
        assert (again.cells, again.areas, again.rows) == (table.cells, table.areas, table.rows)


def test_integers_of_a_small_table_are_as_documented() -> None:
    table = compile_table(find(Kind.BROADCAST, "star"), 2, 1)
    head = [Kind.BROADCAST, 2, 1, 0, 1, 0]
    cells = [1, Space.OUT, 0, 0, -1]
    token_up, data_down = [0, 0, -1, 0, 0, 0, 0], [-1, 0, 0, 1, 0, 0, 1, 0]
    assert table.to_ints().tolist() == [*head, *cells, 2, *token_up, *data_down]


def test_table_is_compiled_once() -> None:
    ring = find(Kind.ALLREDUCE, "ring")
    assert compile_table(ring, 4, 1) is compile_table(ring, 4, 1)


def test_relaying_blocks_of_unknown_length_is_refused() -> None:
    def relay(rank: int, world: int, root: int) -> Iterator[Step]:
        yield Step(then=(Copy(scratch(0 * world + 1), mine(1)),))

    table = compile_table(Schedule("relay", Kind.ALL_TO_ALL, relay), 3, 2)
    (layout,) = layouts(table, Lengths(6), ITEMSIZE, chunk_nbytes=WHOLE)
    assert layout.scratch_nbytes == 64
    uneven = Lengths(6, (1, 2, 3), (1, 1, 3))
    with pytest.raises(InvalidArgument, match="rank 2 cannot relay from rank 0 to rank 1"):
        list(layouts(table, uneven, ITEMSIZE, chunk_nbytes=WHOLE))


def test_one_length_per_rank_is_expected() -> None:
    table = compile_table(find(Kind.ALL_GATHER, "ring"), 3, 0)
    with pytest.raises(InvalidArgument, match="2 block lengths in a world of 3"):
        list(layouts(table, Lengths(6, (3, 3)), ITEMSIZE, chunk_nbytes=WHOLE))


def receives_one_chunk_and_folds_another(rank, world, root):
    other = 1 - rank
    yield Step(Send(other, (mine(1),)), Recv(other, (scratch(1),)))
    first, second = (mine(1), scratch(1)) if rank == 0 else (scratch(1), mine(1))
    yield Step(
        Send(other, (mine(0),)), Recv(other, (scratch(0),)), (Reduce(out(1), (first, second)),)
    )
    first, second = (mine(0), scratch(0)) if rank == 0 else (scratch(0), mine(0))
    yield Step(then=(Reduce(out(0), (first, second)),))


def sends_two_chunks_while_folding_one(rank, world, root):
    """Rank 1 must have sent all of chunk 1 before it reduces what arrives into it."""
    if rank == 1:
        yield Step(then=(Copy(out(0), mine(0)),))
        yield Step(then=(Copy(out(1), mine(1)),))
        local_reduce = Reduce(out(1), (scratch(1), out(1)))
        yield Step(Send(0, (out(0), out(1))), Recv(0, (scratch(1),)), (local_reduce,))
        yield Step(recv=Recv(0, (out(0),)))
        return
    yield Step(Send(1, (mine(1),)), Recv(1, (scratch(0), scratch(1))))
    for chunk in (0, 1):
        yield Step(then=(Reduce(out(chunk), (mine(chunk), scratch(chunk))),))
    yield Step(send=Send(1, (out(0),)))


@pytest.mark.parametrize("count", [1, 5, 7, 4099])
@pytest.mark.parametrize(
    "steps", [receives_one_chunk_and_folds_another, sends_two_chunks_while_folding_one]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_whatever_the_verifier_proves_the_walker_does(steps, count, in_place):
    schedule = Schedule(steps.__name__, Kind.ALLREDUCE, steps, chunks=lambda world: 2)
    verify(schedule, 2)
    config = Config(message_nbytes=4096, chunk_nbytes=1 << 20)

    def body(backend):
        x = np.arange(count, dtype=np.float64) + backend.rank
        return ferrodist.allreduce(x, backend, algorithm=schedule, out=x if in_place else None)

    for result in run_ranks(2, body, config=config):
        np.testing.assert_array_equal(result, 2 * np.arange(count) + 1.0)


def test_two_schedules_of_one_name_are_a_mismatch():
    first = Schedule("mine", Kind.ALLREDUCE, sends_two_chunks_while_folding_one, lambda world: 2)
    second = Schedule("mine", Kind.ALLREDUCE, receives_one_chunk_and_folds_another, lambda world: 2)

    def body(backend):
        schedule = first if backend.rank == 0 else second
        with pytest.raises(ferrodist.CollectiveMismatch, match="mine@"):
            ferrodist.allreduce(np.ones(4), backend, algorithm=schedule)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]
