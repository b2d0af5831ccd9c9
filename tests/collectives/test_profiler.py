"""torch's profiler shows calls of ferrodist and steps of DDP, and costs nothing while none runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import ferrodist

pytestmark = pytest.mark.timeout(60)


def use_everything(backend: ferrodist.Backend) -> None:
    ferrodist.allreduce(np.ones(2), backend)
    ferrodist.allreduce(torch.ones(2), backend)
    ferrodist.allreduce(torch.ones(2), backend, async_op=True).wait()
    ferrodist.allreduce({"a": np.ones(2), "b": torch.ones(2)}, backend)  # on the general path
    ferrodist.scatter(None if backend.rank else np.ones(backend.world_size), backend)
    ferrodist.gather_object("text", backend)
    model = ferrodist.DDP(torch.nn.Linear(2, 1), backend)
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 2))


def test_profiler_shows_every_call_once_and_the_parts_of_a_ddp_step(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> Counter[str]:
        use_everything(backend)  # what is made on first use is there
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            use_everything(backend)
        return Counter(event.name for event in profile.events())

    with start_job(2, body) as job:
        for shown in job.results():
            of_bucket = shown["ferrodist.DDP.start_bucket"]
            assert of_bucket == shown["ferrodist.DDP.wait_for_bucket"] == 1
            assert shown["ferrodist.DDP.forward"] == 2
            assert shown["ferrodist:allreduce"] == 4 + of_bucket
            assert shown["ferrodist:scatter"] == 1
            assert shown["ferrodist:gather_object"] == 1


def test_a_call_that_fails_ends_its_event_and_keeps_its_error(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with pytest.raises(ferrodist.SizeMismatch, match="sizes differ between ranks"):
                ferrodist.allreduce(np.ones(2 + backend.rank), backend)
            ferrodist.barrier(backend)
        return [event.name for event in profile.events() if event.name.startswith("ferrodist:")]

    with start_job(2, body) as job:
        assert job.results() == [["ferrodist:allreduce", "ferrodist:barrier"]] * 2


def test_without_a_profiler_no_event_is_made(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd.profiler, "record_function", pytest.fail)
            use_everything(backend)

    with start_job(2, body) as job:
        job.results()
