# SPDX-License-Identifier: MIT OR Apache-2.0
"""Probes: a script that imports one library, tries it, and prints what it has found as JSON.

Run in a process of its own: a broken library may hang or end its process. Started as a
script, so that a probe costs no more than the library it is for.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

Found = dict[str, Any]
_GLOO_SECONDS = 5


def probe_torch() -> Found:
    torch = importlib.import_module("torch")
    engines = importlib.import_module("torch.distributed")
    has_nccl = engines.is_available() and engines.is_nccl_available()
    return {
        "version": torch.__version__,
        "gloo": _try_gloo(torch, engines),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "no",
        "cuda": str(torch.version.cuda or torch.version.hip or "no"),
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }


def _try_gloo(torch: Any, engines: Any) -> str:
    if not engines.is_available() or not engines.is_gloo_available():
        return "no"
    store = engines.HashStore()
    group = engines.ProcessGroupGloo

    def add(rank: int) -> float:
        options = group._Options()
        options._devices, options._threads = [group.create_device(hostname="127.0.0.1")], 1
        options._timeout = timedelta(seconds=_GLOO_SECONDS)
        total = torch.ones(1) + rank
        made = group(store, rank, 2, options)
        made.allreduce([total]).wait()
        return float(total)

    try:
        with ThreadPoolExecutor(2) as ranks:
            totals = list(ranks.map(add, range(2)))
    except RuntimeError as error:
        return (str(error).splitlines() or ["?"])[0]
    return "works" if totals == [3.0, 3.0] else f"two ranks got {totals}, expected 3.0 twice"


def probe_mpi4py() -> Found:
    package = importlib.import_module("mpi4py")
    mpi = importlib.import_module("mpi4py.MPI")
    return {
        "version": package.__version__,
        "library": _short(mpi.Get_library_version()),
        "world_size": mpi.COMM_WORLD.Get_size(),
        "threads": mpi.Query_thread() == mpi.THREAD_MULTIPLE,
        "standard": ".".join(map(str, mpi.Get_version())),
    }


def _short(text: str) -> str:
    return " ".join(text.strip("\0 \n").splitlines()[0].partition(",")[0].split())


def probe_ray() -> Found:
    """Ask the Ray cluster that a program finds from here what is free; none is started."""
    ray = importlib.import_module("ray")
    found: Found = {"version": ray.__version__, "num_nodes": 0}
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:  # there is none
        return found
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return found | {"num_nodes": num_nodes, "free": ray.available_resources()}


def probe_jax() -> Found:
    """Import jax; its devices are left alone, for it takes all their memory."""
    return {"version": importlib.import_module("jax").__version__}


def probe_cryptography() -> Found:
    importlib.import_module("cryptography.x509")
    return {"version": importlib.import_module("cryptography").__version__}


def probe_ranks() -> Found:
    ferrodist = importlib.import_module("ferrodist")
    totals = ferrodist.run(lambda backend: ferrodist.allreduce(backend.rank + 1.0), 2)
    return {"is_right": totals == [3.0, 3.0], "totals": totals}


PROBES = {
    "torch": probe_torch,
    "mpi4py": probe_mpi4py,
    "ray": probe_ray,
    "jax": probe_jax,
    "cryptography": probe_cryptography,
    "ranks": probe_ranks,
}


def try_probe(name: str) -> Found:
    """Return what a probe finds; of an error only what it says."""
    try:
        return PROBES[name]()
    except Exception as error:  # noqa: BLE001 - whatever a broken library raises is the diagnostic
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def end_with_starter() -> None:
    """End, with all that was started, when the process at the other end of stdin is gone."""

    def watch() -> None:
        if not os.read(0, 1):
            os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # if not, the group is somebody else's
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_starter()
    print(json.dumps(try_probe(sys.argv[1])))
