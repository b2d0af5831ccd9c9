"""How torch finds the backend, and how its ranks meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ferrodist
import ferrodist.torch
from torch_worlds import torch_job

pytestmark = pytest.mark.timeout(120)

ALONE = (
    "dist.init_process_group('ferrodist', store=dist.HashStore(), rank=0, world_size=1); "
    "x = torch.ones(2); dist.all_reduce(x); print(type(dist.group.WORLD).__module__, x.tolist())"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "environment"),
    [
        ("import torch, torch.distributed as dist", {}),
        pytest.param(
            "import ferrodist; import torch, torch.distributed as dist", {}, marks=pytest.mark.long
        ),
        pytest.param(
            "import torch, torch.distributed as dist; import ferrodist.torch",
            {},
            marks=pytest.mark.long,
        ),
        (
            "import ferrodist.torch; import torch, torch.distributed as dist",
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ),
    ],
    ids=["by entry point", "ferrodist first", "torch first", "without autoload"],
)
def test_torch_knows_the_backend_whatever_is_imported_first(imports, environment):
    command = [sys.executable, "-c", f"{imports}; {ALONE}"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "ferrodist.torch.process_group [1.0, 1.0]", done.stderr


def test_the_entry_point_never_breaks_import_torch(monkeypatch):
    import ferrodist_torch

    monkeypatch.setitem(sys.modules, "torch.distributed", None)  # a torch without it
    ferrodist_torch.register()


def test_the_entry_point_imports_nothing_by_itself():
    code = (
        "import sys, ferrodist_torch; ferrodist_torch.register; "
        "print([name for name in ('torch', 'ferrodist', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr


def test_a_list_of_backends_is_refused_with_what_works_instead():
    store = dist.HashStore()
    with pytest.raises(ferrodist.InvalidArgument, match=r'dist\.new_group\(backend="nccl"\)'):
        dist.init_process_group("cpu:ferrodist,cuda:nccl", store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


def test_a_world_can_be_joined_again_by_every_form_of_init(start_job, free_port_number):
    """The same store twice, and env://, tcp:// and a given store, one after the other."""
    folder = tempfile.mkdtemp(prefix="ferrodist-test-")

    def body(backend: ferrodist.Backend, _: Any) -> list[float]:
        rank, size = backend.rank, backend.world_size
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(free_port_number))
        store = dist.FileStore(f"{folder}/given", size)
        place = {"rank": rank, "world_size": size}
        forms: list[dict[str, Any]] = [
            {"init_method": f"file://{folder}/file", **place},
            {"store": store, **place},
            {"store": store, **place},
            {},
            {"init_method": f"tcp://127.0.0.1:{free_port_number}", **place},
        ]
        found = []
        for form in forms:
            dist.init_process_group("ferrodist", timeout=timedelta(seconds=30), **form)
            x = torch.tensor([float(rank)])
            dist.all_reduce(x)
            found.append(x.item())
            dist.destroy_process_group()
        return found

    with start_job(3, body) as job:
        assert job.results() == [[3.0] * 5] * 3


@pytest.fixture
def free_port_number() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(start_job):
    meeting = str(Path(tempfile.mkdtemp(prefix="ferrodist-test-")) / "store")

    def join(backend: ferrodist.Backend, _: Any) -> Any:
        if backend.rank == 1:
            return None
        with pytest.raises(ferrodist.RendezvousError, match="rank 1 of 3 did not join") as caught:
            dist.init_process_group(
                "ferrodist",
                init_method=f"file://{meeting}",
                rank=backend.rank,
                world_size=3,
                timeout=timedelta(seconds=1),
            )
        assert "torch.distributed.init_process_group" in str(caught.value)
        return caught.value.missing

    with start_job(3, join) as job:
        assert job.results() == [[1], None, [1]]


def test_several_hosts_need_a_secret_that_never_goes_through_the_store(start_job, tmp_path):
    """Processes that see different hosts are pretended by a different user's host id."""
    meeting, secret = str(tmp_path / "store"), tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)

    def body(backend: ferrodist.Backend, _: Any) -> Any:
        from ferrodist.rendezvous import torch_store

        rank = backend.rank
        torch_store.host_id = lambda: f"host {rank}"  # type: ignore[assignment] # nothing shared
        place = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=20)}
        with pytest.raises(ferrodist.AuthenticationError, match="FERRODIST_SECRET_FILE"):
            dist.init_process_group("ferrodist", init_method=f"file://{meeting}1", **place)
        os.environ["FERRODIST_SECRET_FILE"] = str(secret)
        dist.init_process_group("ferrodist", init_method=f"file://{meeting}2", **place)
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        kind = type(ferrodist.torch.backend_of()).__name__
        told = Path(f"{meeting}2").read_bytes()  # it goes with the group
        dist.destroy_process_group()
        return x.item(), kind, b"s" * 32 in told

    with start_job(2, body, **{"0:FERRODIST_HOST_ID": "a", "1:FERRODIST_HOST_ID": "b"}) as job:
        assert job.results() == [(3.0, "HybridBackend", False)] * 2


def test_timeouts_are_torchs_and_the_setting_stands_in_for_its_default(start_job):
    def body(rank: int, _: Any) -> Any:
        group = dist.new_group([0, 1])
        chosen = dist.new_group([0, 1], timeout=timedelta(seconds=5))
        return [ferrodist.torch.backend_of(one).timeout for one in (None, group, chosen)]

    with torch_job(start_job, 2, body, seconds=17.0) as job:
        assert job.results() == [[17.0, 1800.0, 5.0]] * 2
    with torch_job(start_job, 2, body, seconds=17.0, FERRODIST_TIMEOUT="44") as job:
        assert job.results() == [[17.0, 44.0, 5.0]] * 2


def add_up_with_gloo(backend: ferrodist.Backend, _: Any) -> tuple[float, float]:
    """Make a group over the backend, and beside it one of Gloo."""
    ferrodist.torch.process_group(backend)
    try:
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
        x, y = torch.tensor([backend.rank + 1.0]), torch.tensor([backend.rank + 10.0])
        dist.all_reduce(x, group=gloo)
        dist.all_reduce(y)
        return x.item(), y.item()
    finally:
        dist.destroy_process_group()


def test_beside_a_group_over_a_backend_gloo_can_be_used(start_job):
    with start_job(3, add_up_with_gloo) as job:
        assert job.results() == [(6.0, 33.0)] * 3


def test_beside_a_group_over_a_backend_of_several_hosts_gloo_can_be_used(start_hybrid_job):
    with start_hybrid_job("001", add_up_with_gloo) as job:
        assert job.results() == [(6.0, 33.0)] * 3


def test_with_tls_no_plain_store_is_opened_between_hosts(start_hybrid_job):
    """On one host nothing of the store is on a network: there it may be."""

    def body(backend: ferrodist.Backend, _: Any) -> Any:
        from torch.distributed import TCPStore

        made: list[Any] = []
        torch.distributed.TCPStore = lambda *args, **options: made.append(args)  # type: ignore[misc,assignment] # it is only counted
        with pytest.raises(ferrodist.InvalidArgument, match="FERRODIST_TLS=1") as caught:
            ferrodist.torch.process_group(backend)
        torch.distributed.TCPStore = TCPStore  # type: ignore[misc] # as it was
        assert "is not encrypted. Call torch.distributed.init_process_group" in str(caught.value)
        assert backend.allreduce(1) == 3  # which goes on
        if backend.rank < 2:
            pair = backend.split([0, 1])
            return made, add_up_with_gloo(pair, None)
        backend.split([2])
        return made, None

    with start_hybrid_job("001", body, FERRODIST_TLS="1") as job:
        assert job.results() == [([], (3.0, 21.0)), ([], (3.0, 21.0)), ([], None)]


def test_if_no_store_can_be_served_every_rank_hears_why(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> str:
        from ferrodist.rendezvous import torch_store

        def refuse(*args: Any, **options: Any) -> Any:
            raise OSError("no port is left")

        torch_store.socket.create_server = refuse
        with pytest.raises(ferrodist.RendezvousError) as caught:
            ferrodist.torch.process_group(backend)
        assert backend.allreduce(1) == 3  # which goes on
        return str(caught.value)

    with start_job(3, body) as job:
        assert job.results() == ["no store of torch's could be served: no port is left"] * 3
