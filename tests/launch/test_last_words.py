"""The end of what a rank has written, and the traceback in it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback

import pytest

from ferrodist.launch.output.logs import MOST_NBYTES, Tail, traceback_in


def test_the_last_bytes_of_a_stream_are_remembered():
    tail = Tail()
    for number in range(100_000):
        tail.add(b"%d\n" % number)
    assert len(tail.read()) == MOST_NBYTES
    assert tail.read().endswith(b"99998\n99999\n")


def raise_plain():
    raise ValueError("boom")


def raise_cause():
    try:
        raise_plain()
    except ValueError as error:
        raise KeyError("caused") from error


def raise_context():
    try:
        raise_cause()
    except KeyError:
        raise RuntimeError("several\nlines\n\nand a gap")  # noqa: B904 -- this is the test


def raise_group():
    errors = []
    for fn in (raise_plain, raise_cause):
        try:
            fn()
        except Exception as error:  # noqa: BLE001 -- it is shown
            errors.append(error)
    raise ExceptionGroup("both", errors)


def shown(fn) -> str:
    """Return what Python shows of an error."""
    try:
        fn()
    except Exception:  # noqa: BLE001 -- it is shown
        return traceback.format_exc()
    raise AssertionError


@pytest.mark.parametrize(
    "fn",
    [raise_plain, raise_cause, raise_context, raise_group],
)
@pytest.mark.parametrize("before", ["", "some words\n", "\r 50%|##   | 5/10 "])
@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_the_last_traceback_is_found_as_a_whole(fn, before, prefix):
    trace = textwrap.indent(shown(fn), prefix, lambda line: True)
    earlier = textwrap.indent(shown(raise_cause), prefix, lambda line: True)
    found = traceback_in(f"{earlier}and on\n{before}{trace}")
    assert found == shown(fn).rstrip("\n")


def test_what_follows_a_traceback_at_length_is_not_part_of_it():
    text = shown(raise_plain) + "\n" + "going on\n" * 100
    assert traceback_in(text) == shown(raise_plain).rstrip("\n")


def error_of(code: str) -> str:
    """Return what a program that fails shows."""
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=50).stderr


def test_a_crash_of_the_interpreter_is_found():
    text = error_of("print('a', flush=True); import os; os.abort()")
    assert traceback_in(f"{shown(raise_plain)}{text}") == text.rstrip("\n")


def test_an_error_that_has_no_header_is_found():
    text = error_of("1 +")
    assert "SyntaxError: invalid syntax" in text
    assert traceback_in(text) == text.rstrip("\n")


def test_where_there_is_no_error_none_is_found():
    assert traceback_in("all is well\n") == ""
