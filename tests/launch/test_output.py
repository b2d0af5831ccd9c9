"""What ranks write: on its way through the launcher nothing is torn, lost, doubled or moved."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small_launcher
from commands import are_gone
from ferrodist import InvalidArgument
from ferrodist.launch.output import reader as reading
from ferrodist.launch.output import writer
from ferrodist.launch.output.console import console_of_files, console_of_streams
from ferrodist.launch.output.logs import LogFiles, Which, parse_choice
from ferrodist.launch.output.reader import LineSplitter, PassThrough, Prefixer, Stream
from ferrodist.launch.output.writer import FileSink, Sink, TextSink, Writer
from small_launcher import launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]

LAUNCHER = Path(small_launcher.__file__)


class Page(Sink):
    """A sink that can be looked at."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def take(self) -> bytes:
        data, self.data = self.data, b""
        return data


class Reader(threading.Thread):
    """Reads a pipe to its end, while this thread launches; ``bite``: at most so much at a time."""

    def __init__(self, bite: int = -1) -> None:
        super().__init__(daemon=True)
        self._read, self.end = os.pipe()
        self._bite = bite
        self.data = b""
        self.start()

    def run(self) -> None:
        with open(self._read, "rb", buffering=0) as pipe:
            self.data = b"".join(iter(lambda: pipe.read(self._bite), b""))

    def finish(self) -> bytes:
        os.close(self.end)
        self.join()
        return self.data


class WatchedFiles:
    """Stands for processes that are waited for whenever the test says so."""

    callback: Callable[[], bool] | None = None

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        assert self.callback is None
        self.callback = callback

    def call(self) -> bool:
        """Call back, and forget whom if he wants no more."""
        callback, self.callback = self.callback, None
        if callback():
            self.callback = callback
        return self.callback is not None


class Stage:
    """Ranks that speak through one writer, at times that the test decides."""

    def __init__(self, num_ranks: int) -> None:
        self.now = 0.0
        self.page = Page()
        self.writer = Writer(self.page, clock=lambda: self.now)
        self.ranks = [
            Prefixer(rank, self.writer) if rank else PassThrough(self.writer)
            for rank in range(num_ranks)
        ]

    def say(self, rank: int, data: bytes) -> bytes:
        """Let a rank write; return what comes out."""
        self.ranks[rank].take(data)
        return self.page.take()

    def wait(self, seconds: float) -> bytes:
        """Let time pass; return what comes out."""
        self.now += seconds
        self.writer.write_due()
        for rank in self.ranks:
            rank.write_due()
        return self.page.take()

    def end(self) -> bytes:
        """End all streams; return what comes out."""
        for rank in self.ranks:
            rank.end()
        self.writer.flush()
        return self.page.take()


# -- de-duplication -------------------------------------------------------------------------------


def test_lines_of_other_ranks_have_their_name_and_lines_of_rank_0_do_not():
    stage = Stage(2)
    assert stage.say(0, b"zero\n") == b"zero\n"
    assert stage.say(1, b"one\n\ntwo\n") == b"rank 1: one\nrank 1:\nrank 1: two\n"


def test_a_line_that_begins_with_the_name_of_its_rank_is_not_given_it_again():
    stage = Stage(2)
    assert stage.say(1, b"rank 1: waits\n") == b"rank 1: waits\n"
    assert stage.say(1, b"rank 0: waits\n") == b"rank 1: rank 0: waits\n"


def test_what_all_say_is_written_once_as_soon_as_the_last_has_said_it():
    stage = Stage(4)
    assert stage.say(1, b"ready\n") == b""
    assert stage.say(0, b"ready\n") == b"ready\n"
    assert stage.say(3, b"ready\n") == b""
    assert stage.say(2, b"ready\n") == b"ranks 1-3: ready\n"


def test_a_traceback_that_rank_0_has_just_shown_is_not_written_again():
    trace = HEADER + b'  File "x.py", line 1\nKeyError: 3\n'
    stage = Stage(3)
    shown = b"".join(stage.say(rank, trace) for rank in range(3)) + stage.end()
    assert shown == trace + b"ranks 1-2: the same traceback\n"
    stage = Stage(3)
    stage.say(0, trace + b"more\n")
    assert (stage.say(1, trace) + stage.say(2, trace) + stage.end()).count(b"KeyError") == 1


def test_what_some_say_waits_a_moment_for_the_others():
    stage = Stage(5)
    stage.say(1, b"a\n")
    assert stage.writer.wait_seconds() == pytest.approx(0.2)
    stage.now += 0.125
    stage.say(3, b"a\n")
    assert stage.writer.wait_seconds() == pytest.approx(0.075)
    assert stage.wait(0.07) == b""
    assert stage.wait(0.01) == b"ranks 1, 3: a\n"
    assert stage.writer.wait_seconds() == float("inf")
    assert stage.say(4, b"a\n") == b""
    assert stage.wait(0.2) == b"rank 4: a\n"


def test_each_rank_keeps_the_order_of_its_lines():
    stage = Stage(3)
    stage.say(1, b"a\nb\n")
    assert stage.say(2, b"b\na\n") == b"rank 1: a\nranks 1-2: b\n"
    assert stage.end() == b"rank 2: a\n"


def test_a_line_is_not_held_for_ranks_that_have_gone_on():
    stage = Stage(3)
    assert stage.say(1, b"a\n") == b""
    assert stage.say(2, b"b\n") == b"rank 1: a\n"


def test_a_line_is_not_held_for_ranks_that_have_ended():
    stage = Stage(4)
    stage.say(1, b"a\n")
    stage.say(2, b"a\n")
    stage.ranks[3].end()
    assert stage.wait(0) == b"ranks 1-2: a\n"


def test_what_comes_after_all_ranks_have_ended_waits_for_nobody():
    stage = Stage(3)
    for rank in stage.ranks:
        rank.retire()
    assert stage.say(2, b"from a process that it left behind\n") != b""


HEADER = b"Traceback (most recent call last):\n"


def test_a_traceback_stays_whole_though_others_have_the_same_header():
    stage = Stage(4)
    for rank in (1, 2, 3):
        stage.say(rank, HEADER)
    for rank in (1, 2, 3):
        stage.say(rank, b'  File "x.py", line %d\n' % (rank % 2))
    said = b"".join(stage.say(rank, b"ValueError: %d\n" % (rank % 2)) for rank in (1, 2, 3))
    of_one = b'Traceback (most recent call last):|  File "x.py", line %d|ValueError: %d|'
    odd, even = ((of_one % (n, n)).split(b"|")[:-1] for n in (1, 0))
    both = [b"ranks 1, 3: " + line for line in odd]
    alone = [b"rank 2: " + line for line in even]
    assert (said + stage.end()).splitlines() == [*both, *alone]


def test_what_looks_like_a_traceback_is_not_held_for_long():
    stage = Stage(2)
    assert stage.say(1, HEADER) == b""
    assert stage.ranks[1].wait_seconds() == pytest.approx(0.2)
    assert stage.wait(0.2) == b"rank 1: " + HEADER
    assert stage.say(1, HEADER) + stage.end() == b"rank 1: " + HEADER


def test_the_traceback_of_a_group_ends_before_what_follows():
    stage = Stage(2)
    lines = [b"  + Exception Group " + HEADER[:-1], b"  | ExceptionGroup: two", b"and on"]
    said = stage.say(1, b"\n".join(lines) + b"\n")
    assert said.splitlines() == [b"rank 1: " + line for line in lines]


def test_equal_lines_of_one_rank_stay_as_many():
    stage = Stage(3)
    stage.say(1, b"x\nx\nx\n")
    assert stage.say(2, b"x\nx\n") == b"ranks 1-2: x\nranks 1-2: x\n"
    assert stage.end() == b"rank 1: x\n"


@pytest.mark.parametrize(
    ("name", "most", "line"), [("MOST_LINES", 10, b""), ("MOST_NBYTES", 100, b"ten bytes.")]
)
def test_only_so_much_is_held_and_the_oldest_goes_first(monkeypatch, name, most, line):
    monkeypatch.setattr(writer, name, most)
    stage = Stage(3)
    assert stage.say(1, b"".join(b"%s%d\n" % (line, n) for n in range(9))) == b""
    assert stage.say(1, b"".join(b"%s%d\n" % (line, n) for n in range(9, 14))) != b""
    held = stage.end()
    assert held.startswith(b"rank 1: %s" % line)
    assert held.endswith(b"13\n")
    assert held.count(b"\n") <= most


def test_ten_thousand_equal_lines_that_two_ranks_say_are_folded_quickly():
    stage = Stage(4)
    stage.say(1, b"\n" * 10_000)
    stage.say(2, b"\n" * 10_000)
    assert stage.end() == b"ranks 1-2:\n" * 10_000


# -- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"a\r\nb\r", b"\nc\r\r\n"], [b"a", b"b", b"c"]),
        ([b"10%\r20%\r", b"30%", b"\rdone\n"], [b"done"]),
        ([b"\r10%", b"\r20%", b"\n"], [b"20%"]),
        ([b"no newline"], [b"no newline"]),
        ([b"bar\r"], [b"bar"]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
        ([b"\n\n"], [b"", b""]),
    ],
)
def test_lines_are_cut_as_a_terminal_would_show_them(pieces, lines):
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.split(piece)] + splitter.end() == lines


def test_a_progress_bar_costs_no_memory():
    splitter = LineSplitter()
    for _ in range(1000):
        assert splitter.split(b"\r" + b"#" * 1000) == []
    assert len(splitter._rest) == 1000


def test_a_line_without_end_is_cut_into_pieces(monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 100)
    stage = Stage(2)
    output = b"".join(stage.say(1, b"x" * 30) for _ in range(10)) + stage.end()
    assert output == b"rank 1: " + b"x" * 120 + b"\nrank 1: " + b"x" * 120 + (
        b"\nrank 1: " + b"x" * 60 + b"\n"
    )


# -- rank 0 ---------------------------------------------------------------------------------------


def test_rank_0_is_passed_through_at_once_and_unchanged():
    stage = Stage(2)
    for data in (b"name? ", b"\r10%", b"\r20%", b".", b"\x1b[31mred\x1b[0m", b"\xff\n"):
        assert stage.say(0, data) == data
    assert stage.end() == b""


def test_others_wait_for_the_end_of_a_line_of_rank_0():
    stage = Stage(2)
    stage.say(0, b"loss: ")
    assert stage.say(1, b"one\n") == b""
    assert stage.say(0, b"0.5\nnext: ") == b"0.5\nrank 1: one\nnext: "


def test_a_line_that_rank_0_leaves_open_is_broken_after_a_while():
    stage = Stage(2)
    stage.say(0, b"name? ")
    stage.now += 0.1
    stage.say(1, b"one\n")
    assert stage.writer.wait_seconds() == pytest.approx(0.1)
    assert stage.wait(0.09) == b""
    assert stage.wait(0.02) == b"\nrank 1: one\n"
    assert stage.say(0, b"\r20%") == b"\r20%"


def test_a_progress_bar_that_never_rests_does_not_silence_the_others():
    stage = Stage(2)
    stage.say(0, b"\r1%")
    stage.say(1, b"one\n")
    output = b""
    for percent in range(2, 20):
        output += stage.wait(0.125) + stage.say(0, b"\r%d%%" % percent)
    assert output.startswith(b"\r2%\r3%\r4%\r5%\r6%\r7%\r8%\nrank 1: one\n\r9%\r10%")


def test_a_line_that_rank_0_leaves_open_at_its_end_is_ended_for_others_only():
    stage = Stage(2)
    stage.say(0, b"the end")
    stage.say(1, b"one\n")
    stage.ranks[0].end()
    assert stage.wait(0) == b"\nrank 1: one\n"


def test_a_full_buffer_of_rank_0_is_not_torn():
    stage = Stage(2)
    lines = b"".join(b"line %d\n" % n for n in range(1000))
    assert len(lines) > 8192 + 10
    first = stage.say(0, lines[:8192])
    assert first.endswith(b"\n")
    assert stage.say(1, b"one\n") == b"rank 1: one\n"
    stage.now += 10
    rest = stage.say(0, lines[8192:])
    assert first + rest == lines


def test_a_prompt_after_a_long_write_comes_in_a_moment():
    stage = Stage(2)
    assert stage.say(0, b"y" * 5000 + b"\nname? ") == b"y" * 5000 + b"\n"
    assert stage.ranks[0].wait_seconds() == pytest.approx(0.2)
    assert stage.wait(0.19) == b""
    assert stage.wait(0.02) == b"name? "
    assert stage.ranks[0].wait_seconds() == math.inf
    stage.say(1, b"one\n")
    assert stage.say(0, b"Ada\n") == b"Ada\nrank 1: one\n"


def test_what_was_held_of_rank_0_goes_before_a_small_write_and_before_the_end():
    stage = Stage(1)
    assert stage.say(0, b"x" * 4096) == b""
    assert stage.say(0, b"y") == b"x" * 4096 + b"y"
    assert stage.say(0, b"z" * 5000) == b""
    assert stage.end() == b"z" * 5000


def test_what_follows_a_full_pipe_is_part_of_it():
    stage = Stage(2)
    first = stage.say(0, b"line\n" * 10_000 + b"to")
    assert stage.say(0, b"gether\nto") == b"together\n"
    assert stage.say(0, b"gether, or a prompt? ") == b"together, or a prompt? "
    assert first == b"line\n" * 10_000


def test_a_terminal_is_never_held_back():
    page = Page()
    prefixer = PassThrough(Writer(page), is_terminal=True)
    prefixer.take(b"x" * 5000)
    assert page.data == b"x" * 5000
    assert not prefixer.waits_for_lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [([b" 0.5", b"\n"], b"loss: 0.5\n"), ([b"."] * 100, b"loss:.....")],
)
def test_a_line_that_comes_word_by_word_gets_a_moment_and_no_more(monkeypatch, words, expected):
    stage, group, now, rest = Stage(1), WatchedFiles(), 0.0, iter(words)
    read, write = os.pipe()
    stream = Stream(read, stage.ranks[0], None)
    stream.watch(group)

    class SlowProcess:
        """Writes another word whenever one is waited for, a millisecond later."""

        def poll(self, milliseconds: float) -> bool:
            nonlocal now
            now += 0.001
            os.write(write, next(rest))
            return True

    monkeypatch.setattr(stream._reader, "_poll", SlowProcess())
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now))
    os.write(write, b"loss:")
    assert group.call() is True
    assert stage.page.take() == expected
    stream.close()
    os.close(write)


def test_while_rank_0_is_in_mid_line_no_more_is_read_than_is_held(monkeypatch):
    monkeypatch.setattr(writer, "MOST_LINES", 10)
    stage = Stage(2)
    stage.say(0, b"loss: ")
    stage.say(1, b"x\n" * 11)
    assert not stage.ranks[1].has_room
    assert stage.say(0, b"0.5\n") == b"0.5\n" + b"rank 1: x\n" * 11
    assert stage.ranks[1].has_room


def test_what_there_is_no_room_for_stays_in_its_pipe(monkeypatch):
    monkeypatch.setattr(writer, "MOST_LINES", 0)
    stage, group = Stage(2), WatchedFiles()
    stage.say(0, b"loss: ")
    stage.say(1, b"x\n")
    read, write = os.pipe()
    stream = Stream(read, stage.ranks[1], None)
    stream.watch(group)
    os.write(write, b"y\n")
    assert group.call() is False  # or it would be called again at once
    stream.write_due()
    assert group.callback is None
    assert stream.tail.read() == b""
    stage.say(0, b"0.5\n")
    stream.write_due()
    assert group.call() is True
    assert stage.page.take() == b"rank 1: y\n"
    os.close(write)
    assert group.call() is False
    stream.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_while_nobody_takes_what_is_written_no_more_is_read(rank):
    stage = Stage(2)
    assert stage.ranks[rank].has_room
    stage.page.has_room = False
    assert not stage.ranks[rank].has_room


def test_a_line_that_rank_0_could_not_go_on_with_is_not_broken():
    stage = Stage(2)
    stage.say(0, b"loss: ")
    stage.say(1, b"one\n")
    stage.page.has_room = False
    assert stage.wait(10) == b""
    stage.page.has_room = True
    assert stage.wait(0.1) == b""
    assert stage.say(0, b"0.5\n") == b"0.5\nrank 1: one\n"


def test_what_was_held_waits_for_its_rest_as_long_as_that_is_not_read():
    stage, group = Stage(1), WatchedFiles()
    read, write = os.pipe()
    stream = Stream(read, stage.ranks[0], None)
    stream.watch(group)
    os.write(write, b"x" * 5000)
    assert group.call() is True
    assert stream.wait_seconds() == pytest.approx(0.2)
    stage.page.has_room = False
    os.write(write, b"y\n")
    assert group.call() is False
    stage.now += 10
    assert stream.wait_seconds() == math.inf
    stream.write_due()
    stage.page.has_room = True
    stream.write_due()
    assert stage.page.take() == b""
    assert group.call() is True
    assert stage.page.take() == b"x" * 5000 + b"y\n"
    stream.close()
    os.close(write)


# -- whatever the order ---------------------------------------------------------------------------

PREFIXED = re.compile(rb"ranks? ([-0-9, ]+):(?: (.*))?", re.DOTALL)


def sorted_by_rank(output: bytes, num_ranks: int) -> list[list[bytes]]:
    """Take output apart again: the lines of each rank, in order."""
    found: list[list[bytes]] = [[] for _ in range(num_ranks)]
    for line in output.split(b"\n"):
        match = PREFIXED.fullmatch(line)
        if not match:
            found[0].append(line)
            continue
        for span in match[1].decode().split(", "):
            first, _, last = span.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank].append(match[2] or b"")
    return found


text = st.lists(st.sampled_from([b"a", b"b", b"", b"much longer than others"]), max_size=8)


@given(
    texts=st.lists(text, min_size=4, max_size=4),
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 12), st.sampled_from([0, 0, 0.05, 0.3]))
    ),
)
def test_whatever_the_order_no_line_of_any_rank_is_lost_doubled_moved_or_torn(texts, turns):
    stage = Stage(4)
    unsaid = [b"".join(b"%s.\n" % line for line in lines) for lines in texts]
    original, output = list(unsaid), b""
    for rank, nbytes, seconds in turns:
        output += stage.say(rank, unsaid[rank][:nbytes]) + stage.wait(seconds)
        unsaid[rank] = unsaid[rank][nbytes:]
    for rank, rest in enumerate(unsaid):
        output += stage.say(rank, rest)
    output += stage.end()
    first, *others = sorted_by_rank(output, 4)
    for rank, lines in enumerate(others, 1):
        assert lines == original[rank].split(b"\n")[:-1]
    assert b"".join(first) == original[0].replace(b"\n", b"")  # its lines may be broken in two
    if not any(seconds for _, _, seconds in turns):
        assert b"\n".join(first) == original[0]


# -- the launcher's own lines ---------------------------------------------------------------------


def test_the_launcher_speaks_after_all_that_was_said_and_never_in_mid_line():
    stage = Stage(3)
    stage.say(1, b"last words\n")
    stage.say(0, b"name? ")
    stage.writer.say("rank 1 is gone\n")
    assert stage.page.take() == b"\nrank 1: last words\nrank 1 is gone\n"


TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    fail()
KeyError: 'boom'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    fail()
ValueError: boom"""


def test_a_traceback_that_all_have_shown_is_at_the_end_whichever_rank_was_last():
    stage = Stage(4)
    stage.say(0, f"\r50% {TRACE}\n".encode())
    assert stage.writer.shows_at_end(TRACE)
    for rank in (2, 3):
        stage.say(rank, f"{TRACE}\n".encode())
    stage.wait(1)
    stage.say(1, textwrap.indent(f"{TRACE}\n", "[rank1]: ").encode())
    assert stage.end().startswith(b"rank 1: [rank1]: Traceback")
    assert stage.writer.shows_at_end(TRACE)


def test_a_traceback_is_at_the_end_though_lines_of_others_are_between():
    stage = Stage(3)
    first, _, rest = TRACE.partition("\n")
    for rank in (1, 2):
        stage.say(rank, f"{first}\n".encode())
    stage.say(0, f"{TRACE}\n".encode())
    for rank in (1, 2):
        stage.say(rank, f"{rest}\n".encode())
    assert stage.writer.shows_at_end(TRACE)


def test_a_traceback_that_is_never_in_one_piece_is_not_at_the_end():
    stage = Stage(2)
    for line in TRACE.splitlines():
        for rank in range(2):
            stage.say(rank, f"{line}\n".encode())
    assert not stage.writer.shows_at_end(TRACE)


@pytest.mark.parametrize(
    "after", ["and on\n", "\n" + "going on\n" * 100, TRACE.replace("boom", "another")]
)
def test_a_traceback_that_something_follows_is_not_at_the_end(after):
    stage = Stage(1)
    stage.say(0, f"{TRACE}\n{after}".encode())
    assert not stage.writer.shows_at_end(TRACE)


def test_a_traceback_stays_the_end_of_the_output_when_the_launcher_writes_a_line_after_it():
    stage = Stage(1)
    stage.say(0, f"{TRACE}\n".encode())
    stage.writer.say("rank 0 is gone")
    assert stage.writer.shows_at_end(TRACE)


# -- places to write to ---------------------------------------------------------------------------


def test_a_character_in_two_pieces_is_text_all_the_same():
    stream = io.StringIO()
    sink = TextSink(stream)
    for byte in "ä€\n".encode():
        sink.write(bytes([byte]))
    sink.write(b"\xff!")
    assert stream.getvalue() == "ä€\n�!"


def test_characters_that_a_stream_does_not_have_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    sink = TextSink(stream)
    sink.write("pi is π\n".encode())
    sink.write(b"and on\n")
    assert sink.error is None
    assert stream.buffer.getvalue() == b"pi is \\u03c0\nand on\n"


def test_a_stream_that_has_been_closed_is_no_error_of_the_ranks():
    stream = io.StringIO()
    stream.close()
    console = console_of_streams(stream, None)
    for one in (console.stdout, console.stderr):
        one.pass_through(b"lost\n")
    assert isinstance(console.error, ValueError)


def test_two_names_of_one_file_share_the_state_of_its_line(tmp_path):
    with (tmp_path / "one").open("wb") as one, (tmp_path / "two").open("wb") as two:
        assert len(console_of_files(0, one.fileno(), one.fileno()).writers) == 1
        assert len(console_of_files(0, one.fileno(), two.fileno()).writers) == 2


def test_nobody_reading_is_remembered_and_what_follows_is_dropped():
    read, write = os.pipe()
    os.close(read)
    console = console_of_files(0, write, write)
    console.stdout.pass_through(b"lost\n")
    assert console.is_broken
    assert isinstance(console.error, BrokenPipeError)
    console.say("lost too")
    os.close(write)


def test_a_full_disk_is_told_from_a_reader_that_has_gone():
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "wb") as full:
        console = console_of_files(0, write, full.fileno())
        console.stdout.pass_through(b"lost\n")
        assert isinstance(console.error, BrokenPipeError)
        console.stderr.pass_through(b"lost\n")
        assert console.error.errno == errno.ENOSPC
    os.close(write)


NUMBERS = b"".join(b"%d\n" % number for number in range(300_000))


@pytest.mark.parametrize("waits", [True, False])
def test_all_is_written_to_a_file_that_takes_little_at_a_time(waits):
    reader = Reader(bite=1000)
    os.set_blocking(reader.end, waits)
    sink = FileSink(reader.end)
    sink.write(NUMBERS)
    sink.finish(lambda: True)
    assert reader.finish() == NUMBERS


def test_a_file_that_nobody_reads_keeps_nobody_waiting_and_gets_all_in_the_end():
    read, write = os.pipe()
    sink = FileSink(write)
    assert sink.wait_seconds() == math.inf
    sink.write(NUMBERS[:-10])
    sink.write(NUMBERS[-10:])
    assert not sink.has_room
    assert sink.wait_seconds() <= 0.05
    found = b""
    while len(found) < len(NUMBERS):
        found += os.read(read, 100_000)
        sink.write_due()
    assert found == NUMBERS
    assert sink.has_room
    assert sink.wait_seconds() == math.inf
    os.close(read)
    os.close(write)


def test_what_was_written_before_a_ctrl_c_is_not_written_again_after_it(monkeypatch):
    def write_and_be_interrupted(file: int, data: bytes) -> int:
        os.write(file, data)
        raise KeyboardInterrupt

    reader = Reader()
    sink = FileSink(reader.end)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_try_write", write_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            sink.write(NUMBERS[:10_000])
    sink.finish(lambda: True)
    assert reader.finish() == NUMBERS[:10_000]


def test_only_in_a_hurry_the_end_does_not_wait_for_one_who_does_not_read(monkeypatch):
    monkeypatch.setattr(writer, "STALL_SECONDS", 0.0)
    read, write = os.pipe()
    console = console_of_files(0, write, write)
    console.stdout.pass_through(b"x" * 100_000)
    answers = iter([False, False, False, True])
    console.finish(lambda: next(answers))
    assert list(answers) == []
    assert isinstance(console.error, TimeoutError)
    console.say("lost")
    console.finish()
    os.close(read)
    os.close(write)


# -- log files ------------------------------------------------------------------------------------


def test_streams_are_chosen_as_with_torchrun():
    assert parse_choice("3").of(7) == Which.BOTH
    choice = parse_choice("0:1,12:3")
    assert [choice.of(rank) for rank in (0, 1, 12)] == [Which.STDOUT, Which.NONE, Which.BOTH]


@pytest.mark.parametrize(
    "value", ["", "4", "-1", "x", "1,2", "0:", "0:4", ":1", "0:1:2", "0:1,0:2"]
)
def test_a_choice_that_is_none_is_refused_with_an_example(value):
    with pytest.raises(InvalidArgument, match=r"2 for stderr .* as in 0:1,1:3") as caught:
        parse_choice(value)
    assert repr(value) in str(caught.value)


SPEAK = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n')"


def read_logs(logs: LogFiles) -> dict[str, str]:
    paths = sorted(logs.directory.rglob("*.log"))
    return {str(path.relative_to(logs.directory)): path.read_text() for path in paths}


@pytest.fixture
def paper(tmp_path):
    """Two files to write to instead of stdout and stderr, as numbers, and what reads them."""
    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        yield (
            out.fileno(),
            err.fileno(),
            lambda: (
                (tmp_path / "out").read_bytes(),
                (tmp_path / "err").read_bytes(),
            ),
        )


def test_by_default_every_stream_is_in_a_file_too(tmp_path, paper):
    *files, read = paper
    logs = LogFiles(tmp_path / "logs")
    launch([SPEAK, SPEAK], console_of_files(0, *files), logs)
    out, err = (data.splitlines() for data in read())
    assert sorted(out) == [b"out", b"rank 1: out"]
    assert sorted(err) == [b"err", b"rank 1: err"]
    assert read_logs(logs) == {
        f"attempt_0/{rank}/std{name}.log": f"{name}\n"
        for rank in range(2)
        for name in ("out", "err")
    }


def test_streams_can_go_to_files_only(tmp_path, paper):
    *files, read = paper
    logs = LogFiles(tmp_path, tee=parse_choice("1:1"), redirects=parse_choice("3"))
    streams = launch([SPEAK, SPEAK], console_of_files(0, *files), logs)
    assert read() == (b"rank 1: out\n", b"")
    assert len(read_logs(logs)) == 4
    assert [streams.ranks[rank].last_output() for rank in range(2)] == ["err\n", "err\n"]


def test_runs_never_share_a_folder(tmp_path):
    assert len({LogFiles(tmp_path).directory for _ in range(3)}) == 3


# -- processes ------------------------------------------------------------------------------------

COUNT = """
out, err = open(1, "w"), open(2, "w", buffering=BUFFERING)
for number in range(25_000):
    print(f"out {number} of {RANK}", file=out)
    print(f"err {number} of {RANK}", file=err)
"""


@pytest.mark.slow
@pytest.mark.parametrize("buffering", [1, -1], ids=["stderr by line", "stderr by buffer"])
def test_under_load_nothing_is_torn_lost_or_moved(buffering):
    reader = Reader()
    count = COUNT.replace("BUFFERING", str(buffering))
    codes = [count.replace("RANK", str(rank)) for rank in range(4)]
    launch(codes, console_of_files(0, reader.end, reader.end))
    for rank, lines in enumerate(sorted_by_rank(reader.finish().rstrip(b"\n"), 4)):
        for name in (b"out", b"err"):
            expected = [b"%s %d of %d" % (name, number, rank) for number in range(25_000)]
            assert [line for line in lines if line.startswith(name)] == expected
        assert len(lines) == 50_000


@pytest.mark.slow
def test_for_a_slow_reader_nothing_is_torn_lost_or_moved(monkeypatch):
    monkeypatch.setattr(writer, "MOST_BACKLOG", 10_000)
    reader = Reader(bite=500)
    write = "import os\nfor number in range(20_000): os.write(1, b'%d of {}\\n' % number)"
    codes = [write.format(rank) for rank in range(3)]
    launch(codes, console_of_files(0, reader.end, reader.end))
    for rank, lines in enumerate(sorted_by_rank(reader.finish().rstrip(b"\n"), 3)):
        assert lines == [b"%d of %d" % (number, rank) for number in range(20_000)]


@pytest.mark.slow
def test_while_nobody_reads_stdout_ranks_are_heard_at_stderr():
    write_until_full = """
import os, select
poll = select.poll()
poll.register(1, select.POLLOUT)
while poll.poll(1000):
    os.write(1, b"on and on\\n" * 100)
os.write(2, b"heard\\n")
"""
    command = [sys.executable, str(LAUNCHER), write_until_full]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr.readline() == b"heard\n"
        process.kill()


def test_a_question_after_long_output_is_asked_and_answered():
    code = "import sys; print('y' * 5000 + '\\nname? ', end='', flush=True); print(input())"
    command = [sys.executable, str(LAUNCHER), code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"y" * 5000 + b"\n"
        assert process.stdout.read(6) == b"name? "
        process.stdin.write(b"Ada\n")
        process.stdin.close()
        assert process.stdout.read() == b"Ada\n"


def test_the_end_waits_for_nobody_whom_a_rank_has_left_behind(paper):
    *files, read = paper
    leave = """
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, end="", flush=True)
"""
    launch(["", leave], console_of_files(0, *files))
    output, _ = read()
    assert output.startswith(b"rank 1: ")
    assert are_gone([int(output.removeprefix(b"rank 1: "))], 0)  # and it is ended


def test_the_last_words_of_a_rank_outlive_it(paper):
    *files, _ = paper
    streams = launch(["", "raise ValueError('boom')"], console_of_files(0, *files))
    assert streams.ranks[1].last_output().endswith("ValueError: boom\n")
    assert streams.ranks[0].last_output() == ""


@pytest.mark.slow
def test_when_nobody_reads_the_job_can_be_ended():
    endless = "while True: print('on and on')"
    command = [sys.executable, str(LAUNCHER), endless, endless]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert b"on and on" in process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 3


def test_rank_0_reads_what_the_launcher_was_given_and_others_nothing():
    read_all = "import sys; print(len(sys.stdin.read()))"
    command = [sys.executable, str(LAUNCHER), read_all, read_all]
    done = subprocess.run(command, input=b"x" * 1000, capture_output=True, timeout=50)
    assert sorted(done.stdout.splitlines()) == [b"1000", b"rank 1: 0"]
