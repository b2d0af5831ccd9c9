"""Members of a job that send nonsense, or run out of files or memory: clear errors, no crash.

A member has proved that it knows the secret of the job, and may still be mistaken, or hostile.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import DistributedError, GroupAborted, ProtocolError, _native
from ferrodist.backends.framing import pack_array_header
from ferrodist.backends.peers import _SETTINGS_NBYTES, _SETTINGS_TAG
from ferrodist.backends.tcp import TcpBackend
from ferrodist.buffer import ArrayKind, DType
from ferrodist.config import Config
from ferrodist.rendezvous import Job as Place
from ferrodist.rendezvous.mesh import join_mesh
from jobs import error_and_time
from test_leaks import memory_nbytes

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

# -- what they say ---------------------------------------------------------------------------------

FRAMES = Path(__file__).parents[2] / "native" / "net" / "frame.hpp"
KINDS = re.findall(r"^    (\w+),", FRAMES.read_text(), re.MULTILINE)


SETTINGS = json.dumps(Config(message_nbytes=1 << 19).shared()).encode()  # those of rank 0, over TCP


class Impostor:
    """Rank 1 of two, who has the key of its link and says what it likes."""

    def __init__(self, place: Place, settings: bytes = SETTINGS) -> None:
        # From elsewhere: of ranks of this host it is found out whether they live, which takes time.
        (rank_0, _) = join_mesh(place, Config(host_id="elsewhere"))
        self.key = rank_0.key
        self.socket = socket.socket(fileno=rank_0.socket)
        self.socket.setblocking(True)
        self.number = 0
        self._agree(settings)

    def _agree(self, words: bytes) -> None:
        """Tell rank 0 these settings, and wait until it has compared them, or is gone."""
        header = pack_array_header(DType.UINT8, (_SETTINGS_NBYTES,), ArrayKind.BYTES)
        message = struct.pack("<H", len(header)) + header + words.ljust(_SETTINGS_NBYTES, b"\0")
        answer = self.frame("eager", message, tag=_SETTINGS_TAG)
        self.socket.sendall(answer)
        with contextlib.suppress(ConnectionError):
            self.socket.recv(len(answer), socket.MSG_WAITALL)  # that they do not differ

    def frame(self, kind: str | int, payload: bytes = b"", **fields: int) -> bytes:
        """Make the next frame of the link."""
        code = kind if isinstance(kind, int) else KINDS.index(kind)
        values = [fields.get(name, 0) for name in ("group", "sequence", "fingerprint", "tag")]
        source = fields.get("source", 1)
        self.number += fields.get("step", 1)
        return bytes(_native.encode_frame(code, *values, payload, self.key, source, self.number))


Nonsense = Callable[[Impostor], list[bytes]]
MATRIX = struct.pack("<2q", 1 << 62, 1 << 62)

# What no member may send: each is an error about the link at once, before memory is set aside.
UNBELIEVABLE: dict[str, Nonsense] = {
    "unknown kind": lambda one: [one.frame(200)],
    "frame left out": lambda one: [one.frame("heartbeat", step=2)],
    "frame repeated": lambda one: [one.frame("heartbeat")] * 2,
    "another's number": lambda one: [one.frame("heartbeat", source=0)],
    "heartbeat with a payload": lambda one: [one.frame("heartbeat", bytes(8))],
    "piece beyond the limit": lambda one: [one.frame("data", bytes(MEGABYTE), sequence=1)[:72]],
    "eager message beyond the limit": lambda one: [one.frame("eager", bytes(70_000))[:72]],
    "descriptor beyond the limit": lambda one: [one.frame("descriptor", bytes(17 << 20))[:72]],
    "group error beyond the limit": lambda one: [one.frame("group_error", bytes(70_000))[:72]],
    "no frame": lambda one: [b"GET / HTTP/1.1\r\n\r\n" * 8],
    "wrong key": lambda one: [_forged(one)],
}

# What is well formed and makes no sense: a clear error, or no effect.
SENSELESS: dict[str, Nonsense] = {
    "descriptor on no call": lambda one: [one.frame("descriptor", b"{}")],
    "difference in no call": lambda one: [one.frame("differ", b"{}")],
    "group error that is no text": lambda one: [
        one.frame("group_error", b"\xff\xfe\x00", sequence=1)
    ],
    "group error of another form": lambda one: [one.frame("group_error", b"[1]", sequence=1)],
    "group error with a foreign error": lambda one: [
        one.frame("group_error", b'["SystemExit", 1, "x", {}, [0, 1]]', sequence=1)
    ],
    "group error on a rank there is not": lambda one: [
        one.frame("group_error", b'["RankLost", 1, "x", {"rank": 9}, [1]]', sequence=1)
    ],
    "leave reason of another form": lambda one: [one.frame("left", b"null", sequence=0)],
    "descriptors of another form": lambda one: [
        one.frame("data", bytes(24), sequence=1, fingerprint=5),
        one.frame("differ", b"[]", sequence=1),
    ],
    "rank status of a rank there is not": lambda one: [
        one.frame("rank_status", struct.pack("<QQIIii", 1, 1, 0, 1, 1 << 30, -5) + b"\xff")
    ],
    "ring of ranks there are not": lambda one: [one.frame("ring", struct.pack("<3i", 7, -1, 9))],
    "group of ranks there are not": lambda one: [
        one.frame("join", struct.pack("<3i", -1, 1, 1 << 30), group=7)
    ],
    "array of overflowing shape": lambda one: [
        one.frame("eager", struct.pack("<H", 18) + bytes([8, 2]) + MATRIX + bytes(24))
    ],
    "array of a negative shape": lambda one: [
        one.frame("eager", struct.pack("<H", 10) + bytes([8, 1]) + struct.pack("<q", -3))
    ],
    "header longer than its message": lambda one: [one.frame("eager", b"\xff\xff" + bytes(9))],
    "offer of all memory": lambda one: [
        one.frame("rts", bytes(20), sequence=1, fingerprint=(1 << 64) - 1)
    ],
    "data nobody waits for": lambda one: [one.frame("bulk", bytes(4096), sequence=77)],
    "credit for what was never sent": lambda one: [one.frame("credit", sequence=(1 << 64) - 1)],
    "piece of the far future": lambda one: [one.frame("data", bytes(8), sequence=(1 << 64) - 1)],
}


# Of these json itself does not say ValueError.
NESTED: dict[str, Nonsense] = {
    "group error nested too deep": lambda one: [
        one.frame("group_error", b"[" * 30_000, sequence=1)
    ],
    "leave reason nested too deep": lambda one: [one.frame("left", b"[" * 30_000, sequence=0)],
}


def _forged(one: Impostor) -> bytes:
    key, one.key = one.key, bytes(32)
    frame = one.frame("heartbeat")
    one.key = key
    return frame


CALLS: list[Callable[[Any], Any]] = [
    lambda backend: ferrodist.allreduce(np.ones(3), backend),
    lambda backend: ferrodist.recv(1, backend, like=np.ones(3)),
    lambda backend: ferrodist.send(np.ones(100_000), 1, backend),
    lambda backend: ferrodist.scatter(None, backend, 1),
    lambda backend: backend.split([0, 1]),
]


def random_nonsense(seed: int) -> Nonsense:
    """Draw some frames of any kind with numbers and payloads that mean nothing."""
    rng = random.Random(seed)
    ints = b"".join(struct.pack("<i", rng.choice([-1, 0, 1, 2, 1 << 30])) for _ in range(10))
    words = [b"", b"{}", b"null", b'["RankLost", 1, "x", {"rank": 5}, [1]]', b'["a", "b"]', ints]
    numbers = [0, 1, 1, 2, 24, 1 << 63, (1 << 64) - 1]
    drawn = [
        (
            rng.choice([*KINDS, "data", "eager", "group_error", "descriptor"]),
            rng.choice([*words, rng.randbytes(rng.randrange(80))]),
            {"sequence": rng.choice(numbers), "fingerprint": rng.choice(numbers)},
        )
        for _ in range(rng.randrange(1, 5))
    ]
    return lambda one: [one.frame(kind, payload, **fields) for kind, payload, fields in drawn]


def meet_impostors(start_tcp_job: Any, cases: list[tuple[Nonsense, Any]]) -> list[list[Any]]:
    """Let rank 0 meet an impostor for each case and make a call; return how its calls ended."""
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    def call(place, make_call):
        before, has_joined = memory_nbytes(), False
        with contextlib.ExitStack() as stack:
            try:
                backend = TcpBackend.join(place, config=Config(timeout=5, join_timeout=5))
                has_joined = True
                stack.callback(backend._fail, ValueError("enough"))
                found = [None, None]
                for number, call in enumerate((make_call, ferrodist.barrier)):
                    with contextlib.suppress(AssertionError):  # no error: stays None
                        found[number] = error_and_time(call, backend)[0]
            except BaseException as error:  # noqa: BLE001 -- whatever it is, the test looks at it
                found = [error, error]
        assert has_joined, found[0]
        return [*found, memory_nbytes() - before]

    def body(backend, pipe):
        results = []
        for number, (nonsense, make_call) in enumerate(cases):
            place = Place(f"{name}-{number}", backend.rank, 2, secret)
            if backend.rank == 0:
                results.append(call(place, make_call))
                ferrodist.send(number, 1, backend)
                continue
            impostor = Impostor(place)
            with impostor.socket:
                for frame in nonsense(impostor):
                    impostor.socket.sendall(frame)
                impostor.socket.shutdown(socket.SHUT_WR)
                ferrodist.recv(0, backend, like=number)
        return results

    with start_tcp_job(2, body) as job:
        first, _ = (rank.hear(200) for rank in job)  # EOFError: rank 0 has crashed
    assert first.error is None, first.trace
    return first.result


def test_what_no_member_may_send_is_refused_before_memory_is_set_aside(start_tcp_job):
    cases = [(nonsense, CALLS[0]) for nonsense in UNBELIEVABLE.values()]
    for name, found in zip(UNBELIEVABLE, meet_impostors(start_tcp_job, cases), strict=True):
        error, later, nbytes = found
        assert isinstance(error, ProtocolError), (name, error)
        assert isinstance(later, (GroupAborted, ProtocolError)), (name, later)
        assert nbytes < 12 * MEGABYTE, name


@pytest.mark.parametrize("senseless", [SENSELESS, NESTED], ids=["senseless", "nested"])
def test_what_makes_no_sense_is_an_error_in_words(start_tcp_job, senseless):
    cases = [
        (nonsense, CALLS[1] if "array" in name else CALLS[0])
        for name, nonsense in senseless.items()
    ]
    found = meet_impostors(start_tcp_job, cases)
    for name, (error, later, _) in zip(senseless, found, strict=True):
        for one in (error, later):
            assert one is None or isinstance(one, DistributedError), (name, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 10_000), marks=slow)], ids=["few", "many"]
)
def test_a_member_that_sends_nonsense_is_an_error_in_words(start_tcp_job, seeds):
    for begin in range(seeds.start, seeds.stop, 100):
        some = range(begin, min(begin + 100, seeds.stop))
        cases = [(random_nonsense(seed), CALLS[seed % len(CALLS)]) for seed in some]
        found = meet_impostors(start_tcp_job, cases)
        for seed, (error, later, _) in zip(some, found, strict=True):
            for one in (error, later):
                assert one is None or isinstance(one, DistributedError), (seed, one)


@pytest.mark.parametrize(
    "words",
    [
        b"[]",
        b"null",
        b"\xff",
        b"",
        b'{"difference": [1]}',
        b'{"difference": "x"}',
        b"{}",
        b"[" * 1000,
    ],
)
def test_settings_that_cannot_be_read_are_an_error_in_words(start_tcp_job, words):
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    def body(backend, pipe):
        place = Place(name, backend.rank, 2, secret)
        if backend.rank == 1:
            with Impostor(place, words).socket:
                return ferrodist.recv(0, backend)
        error, _ = error_and_time(lambda: TcpBackend.join(place, config=Config(join_timeout=5)))
        ferrodist.send(1, 1, backend)
        return error

    with start_tcp_job(2, body) as job:
        error, _ = job.results()
    assert isinstance(error, DistributedError), repr(error)


# -- too few files, too little memory --------------------------------------------------------------


def use_up_files() -> list[int]:
    """Open files until there are no more to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    return files


def test_a_rank_without_a_file_to_spare_works_on(start_tcp_job):
    def body(backend, pipe):
        files = use_up_files() if backend.rank == 1 else []
        group = backend.split([2, 1, 0])
        work = ferrodist.allreduce(np.full(100_000, backend.rank), group, async_op=True)
        peer = (backend.rank + 1) % 3, (backend.rank + 2) % 3
        came = ferrodist.sendrecv(
            np.full(50_000, backend.rank), peer[0], peer[1], backend, like=np.ones(50_000, int)
        )
        with pytest.raises(ferrodist.SizeMismatch):
            ferrodist.allreduce(np.ones(2 + backend.rank), backend)
        found = int(work.wait(20)[-1]), int(came[0]), len(files) > 50
        for file in files:
            os.close(file)
        return found

    with start_tcp_job(3, body) as job:
        assert job.results() == [(3, 2, False), (3, 0, True), (3, 1, False)]


def test_a_rank_without_files_cannot_join_says_so_and_harms_no_other_job(start_tcp_job):
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    def body(backend, pipe):
        files = use_up_files() if backend.rank == 1 else []
        place = Place(name, backend.rank, 3, secret)
        error, _ = error_and_time(lambda: TcpBackend.join(place, config=Config(join_timeout=1.5)))
        for file in files:
            os.close(file)
        return error, ferrodist.allreduce(1, backend)

    with start_tcp_job(3, body) as job:
        results = job.results()
    assert [total for _, total in results] == [3, 3, 3]
    errors = [error for error, _ in results]
    assert all(isinstance(error, ferrodist.RendezvousError) for error in errors), errors
    assert "a process may open 200 files here" in str(errors[1])
    assert "'ulimit -n 273'" in str(errors[1])  # 73 for the job, and those that are open


def test_a_rank_without_memory_for_a_message_says_so_and_the_group_goes_on(start_tcp_job):
    """Rank 0 sends more than rank 1, which asks for none of it, has room for."""

    def body(backend, pipe):
        def error_of(call):
            try:
                for _ in range(2000):
                    call()
            except DistributedError as error:
                return error

        found, x = None, np.zeros(8000)
        ferrodist.barrier(backend)
        if backend.rank == 1:
            used = Path("/proc/self/statm").read_text().split()[0]  # pages of addresses
            limit = int(used) * resource.getpagesize() + 40 * MEGABYTE
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            pipe.send("ready")
            pipe.recv()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            found = error_of(lambda: ferrodist.recv(0, backend, like=x, timeout=20))
        elif backend.rank == 0:
            pipe.recv()
            found = error_of(lambda: ferrodist.send(x, 1, backend))
            pipe.send("sent")
        return found, int(ferrodist.allreduce(1, backend))

    with start_tcp_job(3, body, FERRODIST_UNEXPECTED_NBYTES=str(1 << 30)) as job:
        assert job[1].hear() == "ready"
        job[0].tell()
        assert job[0].hear() == "sent"
        job[1].tell()
        (sender, _), (receiver, _), _ = results = job.results()
    assert [total for _, total in results] == [3, 3, 3]
    for error in (sender, receiver):
        assert isinstance(error, ferrodist.OutOfMemory)
        assert "no memory for" in str(error)
