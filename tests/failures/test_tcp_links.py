"""Links that are cut, frozen, slow or damaged: told as what they are, and never believed.

In a world of three the proxy of rank 1 stands in the way of one link, that of ranks 1 and 2.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import Evicted, GroupAborted, ProtocolError, RankLost
from ferrodist.testing import FaultProxy, LinkFaults, contract_cases, run_contract
from jobs import QUICK, error_and_time

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
GIVEN_UP = "the others have given this rank up: "  # on the rank that they name
JOINED = 3000  # bytes of a link by which its two ends have long met


class WrongSum(Exception):
    """Damage that was not noticed."""


def checked_calls(backend: Any, nbytes: int) -> None:
    """Make calls whose results are known, until one raises."""
    world, count = backend.world_size, max(1, nbytes // 8)
    x = np.arange(count, dtype=float) + backend.rank
    total = world * np.arange(count, dtype=float) + sum(range(world))
    blocks = np.repeat(np.arange(world) + 10 * backend.rank, count)
    while True:
        for algorithm in ("ring", "direct"):
            if not np.array_equal(ferrodist.allreduce(x, backend, algorithm=algorithm), total):
                raise WrongSum(algorithm)
        swapped = ferrodist.all_to_all(blocks, backend)
        if not np.array_equal(swapped, np.repeat(10 * np.arange(world) + backend.rank, count)):
            raise WrongSum("all_to_all")


@contextmanager
def proxied_rank(rank: int, faults: LinkFaults | None = None) -> Iterator[Any]:
    """Give a proxy, and the environment of a job whose ranks reach this one through it alone.

    Those above it connect to it, so in a world of three only one link leads through the proxy of
    rank 1, and two through that of rank 0.
    """
    with socket.socket() as place:  # holds the port: others may listen at it who ask for it by name
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        address = place.getsockname()
        with FaultProxy(address, faults=faults) as proxy:
            yield (
                proxy,
                {
                    f"{rank}:FERRODIST_PORTS": str(address[1]),
                    f"{rank}:FERRODIST_ADVERTISE": "{}:{}".format(*proxy.address),
                },
            )


def harmed_job(
    start_tcp_job: Any,
    faults: LinkFaults,
    nbytes: int,
    *,
    proxied: int = 1,
    world: int = 3,
    harm: Callable[[Any], None] | None = None,
) -> tuple[list[tuple[BaseException, float]], list[BaseException], float]:
    """Run calls over a link that suffers; return errors with times, later errors, and when."""

    def body(backend, pipe):
        ended = error_and_time(checked_calls, backend, nbytes)
        pipe.send(ended)
        pipe.recv()  # all have raised: what follows is about later calls
        return error_and_time(ferrodist.barrier, backend)[0]

    with proxied_rank(proxied, faults) as (proxy, environment):
        with start_tcp_job(world, body, **environment, **QUICK) as job:
            struck = time.monotonic()
            if harm is not None:
                proxy.wait_for_bytes(JOINED + 2 * nbytes)
                struck = time.monotonic()
                harm(proxy)
            ends = [rank.hear() for rank in job]
            for rank in job:
                rank.tell()
            return ends, [rank.end().result for rank in job], struck


# -- gone ------------------------------------------------------------------------------------------


def assert_one_end_is_lost(ends: list[tuple[BaseException, float]]) -> None:
    """All ranks name an end of the link between ranks 1 and 2, those in one call the same."""
    errors = [error for error, _ in ends]
    for rank, error in enumerate(errors):
        assert type(error) is (Evicted if error.rank == rank else RankLost), errors
    texts = {str(error).removeprefix(GIVEN_UP) for error in errors}
    assert len(texts) == len({error.sequence for error in errors})
    for error in errors:
        assert error.rank in (1, 2)
        assert f"rank {error.rank} is alive (pid " in str(error)
        assert f"but not connected to rank {3 - error.rank} any more" in str(error)


@pytest.mark.parametrize("nbytes", [48, MEGABYTE])
@pytest.mark.parametrize("how", ["cut", "reset"])
def test_a_cut_or_reset_link_is_told_on_all_ranks_as_what_it_is(start_tcp_job, how, nbytes):
    ends, later, struck = harmed_job(
        start_tcp_job, LinkFaults(), nbytes, harm=lambda proxy: getattr(proxy, how)()
    )
    assert_one_end_is_lost(ends)
    assert all(when - struck < 2 for _, when in ends)
    assert all(isinstance(error, RankLost | Evicted) for error in later)


@pytest.mark.parametrize("how", ["cut_after", "reset_after"])
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 30), marks=slow)], ids=["few", "many"]
)
def test_a_link_that_ends_in_the_middle_of_a_message_is_a_lost_rank(start_tcp_job, how, seeds):
    for seed in seeds:
        rng = random.Random(seed)
        nbytes = rng.choice([48, 5000, MEGABYTE])
        position = JOINED + rng.randrange(nbytes + 2000)
        faults = LinkFaults(
            **{how: position}, direction=rng.choice(["to_target", "from_target", "both"])
        )
        ends, _, _ = harmed_job(start_tcp_job, faults, nbytes)
        assert_one_end_is_lost(ends)


def test_a_frozen_link_is_a_silent_rank_at_the_limit(start_tcp_job):
    """The other side of a cable that was pulled: nothing ends, nothing comes."""
    ends, later, struck = harmed_job(
        start_tcp_job, LinkFaults(), 50_000, harm=lambda proxy: proxy.freeze()
    )
    for rank, (error, when) in enumerate(ends):
        assert type(error) is (Evicted if error.rank == rank else RankLost)
        assert error.rank in (1, 2)
        assert f"rank {error.rank} has sent no heartbeat for 1 s" in str(error)
        assert abs(when - struck - 1) < 0.5
    assert all(isinstance(error, RankLost | Evicted) for error in later)


def test_a_link_that_froze_while_nobody_called_is_noticed_by_the_next_call(start_tcp_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        pipe.send("idle")
        pipe.recv()
        return error_and_time(checked_calls, backend, 24)

    with proxied_rank(1) as (proxy, environment):
        with start_tcp_job(3, body, **environment, **QUICK) as job:
            for rank in job:
                assert rank.hear() == "idle"
            proxy.freeze()
            frozen = time.monotonic()
            for rank in job:
                rank.tell()
            for rank in job:
                error, when = rank.end().result
                assert isinstance(error, RankLost | Evicted)
                assert error.rank in (1, 2)
                assert when - frozen < 2.5


def test_a_link_that_pauses_for_less_than_the_limit_harms_nobody(start_tcp_job):
    def body(backend, pipe):
        x = np.full(100_000, backend.rank)
        return [int(ferrodist.all_gather(x, backend, algorithm="direct")[-1]) for _ in range(20)]

    with proxied_rank(1) as (proxy, environment):
        with start_tcp_job(3, body, **environment, **QUICK) as job:
            proxy.wait_for_bytes(MEGABYTE)
            proxy.freeze()
            time.sleep(0.4)  # what must not matter
            proxy.thaw()
            assert job.results() == [[2] * 20] * 3


# -- damaged ---------------------------------------------------------------------------------------


def assert_damage_is_told(
    ends: list[tuple[BaseException, float]], later: list[BaseException], failed_rank: int
) -> None:
    """All ranks name the rank that sent the damage; ranks not yet in that call are told, too."""
    errors = [error for error, _ in ends]
    assert any(isinstance(error, ProtocolError) for error in errors), errors
    for error in [*errors, *later]:
        assert isinstance(error, (ProtocolError, GroupAborted)), error
        assert error.rank == failed_rank
        assert f"bytes from rank {failed_rank} cannot be right (" in str(error)
    assert all(isinstance(error, GroupAborted) for error in later), later


def flip_and_call(start_tcp_job: Any, seed: int) -> None:
    """Flip one bit somewhere in what a link carries, and expect all ranks to say so."""
    rng = random.Random(seed)
    nbytes = rng.choice([48, 48, 5000, 300_000])
    position = JOINED + rng.randrange(nbytes + 1000)
    direction = rng.choice(["to_target", "from_target"])
    faults = LinkFaults(flip_after=position, direction=direction, seed=seed)
    ends, later, _ = harmed_job(start_tcp_job, faults, nbytes)
    # Rank 2 connects to rank 1, which is the target: who hears the damage accuses the other.
    assert_damage_is_told(ends, later, 2 if direction == "to_target" else 1)


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 200), marks=slow)], ids=["few", "many"]
)
def test_a_flipped_bit_is_told_by_all_ranks_and_is_never_in_a_result(start_tcp_job, seeds):
    for seed in seeds:
        flip_and_call(start_tcp_job, seed)


@pytest.mark.parametrize(
    "positions",
    [range(JOINED, JOINED + 200, 30), pytest.param(range(JOINED, JOINED + 400), marks=slow)],
    ids=["some", "all"],
)
def test_a_bit_flipped_in_any_byte_of_small_messages_is_noticed(start_tcp_job, positions):
    """Two hundred bytes hold several headers of 72 bytes, with everything that is in them."""
    for position in positions:
        faults = LinkFaults(flip_after=position, direction="to_target", seed=position)
        ends, later, _ = harmed_job(start_tcp_job, faults, 24)
        assert_damage_is_told(ends, later, 2)


def test_damage_on_the_links_of_rank_0_is_told_by_all(start_tcp_job):
    """Rank 0 is whom the others ask for the group error; here it is what they do not hear well."""
    faults = LinkFaults(flip_after=20_000, direction="from_target")
    ends, later, _ = harmed_job(start_tcp_job, faults, 5000, proxied=0)
    assert_damage_is_told(ends, later, 0)


def test_damage_while_nobody_calls_is_told_by_the_next_call(start_tcp_job):
    """All that travels then are heartbeats."""

    def body(backend, pipe):
        pipe.send("idle")
        pipe.recv()
        ended = error_and_time(checked_calls, backend, 24)
        return ended, error_and_time(ferrodist.send, 1, (backend.rank + 1) % 3, backend)[0]

    faults = LinkFaults(flip_after=JOINED, direction="from_target")
    with proxied_rank(1, faults) as (proxy, environment):
        with start_tcp_job(3, body, **environment, FERRODIST_HEARTBEAT="0.02") as job:
            for rank in job:
                assert rank.hear() == "idle"
            proxy.wait_for_bytes(JOINED + 72, direction="from_target")
            for rank in job:
                rank.tell()
            ends, later = zip(*job.results(), strict=True)
    assert_damage_is_told(list(ends), list(later), 1)


def test_a_damaged_message_is_not_handed_out(start_tcp_job):
    def body(backend, pipe):
        peer = 1 - backend.rank
        x = np.arange(200_000)
        while True:
            for count in (3, 200_000):
                like = x[:count]
                if not np.array_equal(
                    ferrodist.sendrecv(like, peer, peer, backend, like=like), like
                ):
                    return "wrong"

    for position in (JOINED, JOINED + 90, 30_000, 900_000):
        with proxied_rank(0, LinkFaults(flip_after=position, direction="to_target")) as found:
            with start_tcp_job(2, body, **found[1]) as job:
                first, second = (rank.end().error for rank in job)
        assert isinstance(first, ProtocolError)
        assert first.rank == 1
        assert isinstance(second, (RankLost, ProtocolError, GroupAborted))


# -- slow ------------------------------------------------------------------------------------------

SLOW_LINKS = {
    "late": LinkFaults(delay=0.003, jitter=0.003, seed=1),
    "narrow": LinkFaults(rate=8e6),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SLOW_LINKS)
def test_a_slow_link_changes_no_result(start_tcp_job, how):
    def body(backend, pipe):
        cases = contract_cases(backend.world_size, 5, in_order=False, libraries=["numpy"])
        return run_contract(backend, [case for case in cases if case.detail != "libraries"][:50])

    with proxied_rank(0, SLOW_LINKS[how]) as (_, environment):
        with start_tcp_job(3, body, **environment) as job:
            reports = job.results()
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))


def test_leaving_after_the_last_call_harms_nobody_on_a_narrow_link(start_tcp_job):
    """Megabytes are still on their way when ranks are out of the call, and gone."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        x = np.full(MEGABYTE // 2, float(backend.rank))
        return float(ferrodist.all_gather(x, backend, algorithm="ring").sum())

    with proxied_rank(1, LinkFaults(rate=5e6)) as (_, environment):
        with start_tcp_job(3, body, **environment) as job:
            assert job.results() == [3 * MEGABYTE / 2] * 3
