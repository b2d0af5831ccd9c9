"""A real SLURM on this machine: munged, slurmctld and two slurmd, in a folder that goes away.

They share one mount and pid namespace: the names of the two nodes are in a hosts file that nobody
else sees, and the end of the namespace is the end of all that SLURM has started. It needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("setpriv", "unshare", "munged", "slurmctld", "slurmd", "srun", "sinfo")
NODES = ("n1", "n2")
START_SECONDS = 60.0

# munged, which goes to the background when it answers, then the others; if one ends, all do.
_START = """
mount --bind "$1/hosts" /etc/hosts &&
munged --socket="$1/munge.socket" --key-file="$1/munge.key" --pid-file="$1/munged.pid" \
    --seed-file="$1/munged.seed" --log-file="$1/munged.log" &&
export SLURM_CONF="$1/slurm.conf" && {
    slurmctld -D &
    slurmd -D -N n1 &
    slurmd -D -N n2 &
    wait -n
}
"""

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Say why SLURM cannot run here; '' if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge libpmix-dev"
    return "" if os.geteuid() == 0 else "slurmctld, slurmd and a mount namespace need root"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Cluster:
    """SLURM while it runs: how to run a command under it, and what its daemons have logged."""

    def __init__(self, folder: Path, daemons: subprocess.Popen[bytes]) -> None:
        self.folder, self._daemons = folder, daemons
        self.munge_socket = folder / "munge.socket"

    def environ(self, **more: str) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "FERRODIST_"))}
        return kept | {"PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")} | more

    def run(
        self, command: list[str], environ: Mapping[str, str] | None = None, seconds: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM's to its end."""
        return subprocess.run(
            command,
            env=self.environ(**(environ or {})),
            text=True,
            capture_output=True,
            timeout=seconds,
            check=False,
        )

    def wait_until_idle(self) -> None:
        """Wait until both nodes take jobs; raises if they do not."""
        end = time.monotonic() + START_SECONDS
        while True:
            done = self.run(["sinfo", "-h", "-N", "-o", "%T"])
            if done.stdout.split() == ["idle"] * len(NODES):
                return
            if self._daemons.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"SLURM does not start: {done}\n{self.logs()}")
            time.sleep(0.1)  # sinfo has nothing to wait with

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run SLURM; when this ends nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="ferrodist-slurm-"))
    try:
        folder.chmod(0o755)  # other users reach munged's socket
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
            (folder / f"tmp.{node}").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} n1 n2\n")
        conf = _CONF.format(folder=folder, host=socket.gethostname(), ports=_free_ports(3))
        (folder / "slurm.conf").write_text(conf)
        with (folder / "start.log").open("wb") as log:
            daemons = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # however this process ends
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-c", _START, "start", str(folder)),
                ],
                env=os.environ | {"PATH": _path()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            made = Cluster(folder, daemons)
            made.wait_until_idle()
            yield made
        finally:
            os.killpg(daemons.pid, signal.SIGKILL)
            daemons.wait()
    finally:
        shutil.rmtree(folder)
