"""Which cores ranks get: side by side, whole ones, and only if there are enough."""

from __future__ import annotations

import os

import pytest

from ferrodist.launch import machine as cores


@pytest.fixture
def machine(monkeypatch):
    """Make a machine of two sockets with two cores each, two threads per core, numbered apart."""

    def read(cpu: int, name: str) -> int:
        return {"physical_package_id": cpu // 2 % 2, "core_id": cpu % 2}[name]

    monkeypatch.setattr(cores, "_read_topology", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "container_cpus", lambda: 1 << 20)


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(machine):
    assert cores.share_cores(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cores.share_cores(4) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert cores.share_cores(1) == [set(range(8))]


def test_what_does_not_divide_evenly_is_shared_out_all_the_same(machine):
    parts = cores.share_cores(3)
    assert sorted(map(len, parts)) == [2, 3, 3]
    assert set.union(*parts) == set(range(8))


def test_nobody_is_bound_where_there_are_too_few(machine, monkeypatch):
    assert cores.share_cores(9) is None
    monkeypatch.setattr(cores, "container_cpus", lambda: 3)
    assert cores.usable_cores() == 3
    assert cores.share_cores(4) is None
    assert cores.threads_per_rank(2) == 1


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 1 << 20),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 20),
        ({}, 1 << 20),
    ],
)
def test_what_the_container_grants_is_rounded_up(files, granted, monkeypatch, tmp_path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    assert cores.container_cpus() == granted


def test_this_machine_can_be_read():
    assert 1 <= cores.usable_cores() <= len(os.sched_getaffinity(0))
    assert set.union(*cores.share_cores(1)) == os.sched_getaffinity(0)
    assert cores._read_topology(10**6, "core_id") == 0
