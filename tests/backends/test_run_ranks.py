"""run_ranks and the pytest plugin."""

import threading

import pytest

import ferrodist
from ferrodist import CollectiveTimeout, GroupAborted, RankLost
from ferrodist.testing import run_ranks

pytest_plugins = ["pytester"]


def test_results_come_in_rank_order():
    assert run_ranks(5, lambda backend: backend.rank**2) == [0, 1, 4, 9, 16]


def test_all_errors_are_raised_causes_first():
    def body(backend):
        if backend.rank == 3:
            raise KeyError("k")
        if backend.rank == 1:
            ferrodist.recv(3, backend)
        ferrodist.barrier(backend)

    words = "4 of 4 ranks failed; first, on rank 3: KeyError: 'k'"
    with pytest.raises(ExceptionGroup, match=words) as caught:
        run_ranks(4, body)
    first, *others = caught.value.exceptions
    assert isinstance(first, KeyError)
    assert first.__notes__ == ["on rank 3"]
    assert {type(error) for error in others} == {RankLost}


def test_two_causes_come_before_every_consequence():
    both = threading.Barrier(2)

    def body(backend):
        if backend.rank in (1, 2):
            both.wait(10)
            raise ValueError(backend.rank)
        ferrodist.barrier(backend)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(4, body)
    assert [type(e) for e in caught.value.exceptions] == [
        ValueError,
        ValueError,
        RankLost,
        RankLost,
    ]


@pytest.mark.slow
def test_a_thread_stuck_elsewhere_is_named_with_its_place():
    release = threading.Event()

    def body(backend):
        if backend.rank == 0:
            raise ValueError("boom")
        if backend.rank == 1:
            release.wait(20)
        else:
            ferrodist.barrier(backend)

    try:
        with pytest.raises(ExceptionGroup) as caught:
            run_ranks(3, body, grace=0.2)
    finally:
        release.set()
    cause, stuck, consequence = caught.value.exceptions
    assert isinstance(cause, ValueError)
    assert isinstance(stuck, CollectiveTimeout)
    assert "rank 1 is stuck outside ferrodist, at " in str(stuck)
    assert f"{__file__}:{body.__code__.co_firstlineno + 4} in body" in str(stuck)
    assert isinstance(consequence, RankLost)


def test_a_world_that_takes_too_long_is_woken():
    def body(backend):
        if backend.rank == 0:
            ferrodist.recv(1, backend, timeout=None)
        else:
            ferrodist.recv(0, backend, timeout=None)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, body, timeout=0.2)
    assert {type(error) for error in caught.value.exceptions} == {GroupAborted}
    text = str(caught.value.exceptions[0])
    assert "run_ranks gave up after 0.2 s, its timeout=" in text
    assert "rank 1 has made no call yet" in text


def test_sys_exit_on_a_rank_is_told_to_the_others():
    def body(backend):
        if backend.rank == 0:
            raise SystemExit(3)
        ferrodist.barrier(backend)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_ranks(2, body)
    assert isinstance(caught.value.exceptions[0], SystemExit)
    assert "raised SystemExit: 3" in str(caught.value.exceptions[1])


def test_no_thread_is_left_behind():
    before = threading.active_count()
    run_ranks(4, ferrodist.barrier)
    assert threading.active_count() == before


@pytest.mark.world(2, 3)
def test_the_world_fixture_runs_a_test_for_every_size(world):
    assert world.run(lambda backend: ferrodist.allreduce(1, backend)) == [world.size] * world.size


@pytest.mark.slow
def test_the_plugin_in_somebody_elses_project(pytester):
    pytester.makepyfile(
        """
        import ferrodist, pytest

        def test_default_sizes(world):
            assert world.run(lambda b: b.world_size) == [world.size] * world.size

        @pytest.mark.world(4)
        def test_marked(world):
            assert world.size == 4

        @pytest.mark.parametrize("world", ["mine"])
        def test_a_parameter_of_that_name(world):
            assert world == "mine"
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=5)
    pytester.runpytest_subprocess("--worlds", "1,2,4,8", "-k", "default").assert_outcomes(
        passed=4, deselected=2
    )


def test_the_error_of_a_work_nobody_asked_is_not_lost():
    def body(backend):
        ferrodist.allreduce([1.0] * (1 + backend.rank), backend, async_op=True)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, body)
    assert {type(e) for e in caught.value.exceptions} == {ferrodist.CollectiveMismatch}
