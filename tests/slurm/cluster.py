"""A real Slurm on hosts that are namespaces: controller on n1, node daemons on all, partitions as clusters have.

    with Slurm() as slurm:
        job = slurm.submit("slurm/cpu.sh", cwd=folder)
        assert slurm.ended(job) == "COMPLETED"

Every daemon is a process of a host and ends with it, however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hpcsync.system import launcher
from hpcsync.system.namespaces import NETWORK, Hosts, Unavailable
from tests.hosts.processes import processes

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PMIX = next(Path("/usr/lib").glob("*/pmix2/lib"), Path("none"))  # where Debian's Slurm looks for a libpmix.so
CPUS = 8  # of a host, which shares the machine's with the others
UP_S = 100.0
GRACE_S = 30  # between the signal to a job that has to make room and its end

CONF = f"""
ClusterName=test
SlurmctldHost=n1({NETWORK}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={{folder}}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool.%n
TmpFS=/dev/shm
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd.%n.pid
SlurmctldLogFile={{folder}}/slurmctld.log
SlurmdLogFile={{folder}}/slurmd.%n.log
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
MinJobAge=300
SlurmdTimeout=10
MailProg=/bin/true
NodeName=n[1-2] CPUs={CPUS} RealMemory=8000
NodeName=n[3-4] CPUs={CPUS} RealMemory=8000 Gres=gpu:2
PartitionName=cpu Nodes=n[1-4] Default=YES MaxTime=INFINITE PriorityTier=50 PreemptMode=OFF
PartitionName=gpu Nodes=n[3-4] MaxTime=INFINITE PriorityTier=50 PreemptMode=OFF
PartitionName=old Nodes=n[1-2] MaxTime=INFINITE PriorityTier=50 PreemptMode=OFF
PartitionName=new Nodes=n[3-4] MaxTime=INFINITE PriorityTier=50 PreemptMode=OFF
PartitionName=preemptible Nodes=n[1-4] MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime={GRACE_S}
"""
GPUS = "".join(f"NodeName=n[3-4] Name=gpu File=/dev/{device}\n" for device in ("null", "zero"))
FILES = {"gres.conf": GPUS, "cgroup.conf": "CgroupPlugin=cgroup/v1\n"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Slurm:
    """Four nodes n1 to n4, of which n3 and n4 say that they have two GPUs, until `close`. Raises Unavailable."""

    def __init__(self) -> None:
        if missing := [tool for tool in DAEMONS if not shutil.which(tool)]:
            raise Unavailable(f"not installed: {', '.join(missing)}")
        self.hosts = Hosts(4)
        self.folder = Path(tempfile.mkdtemp(prefix="hpcsync-slurm-", dir="/run"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        for name, text in {"slurm.conf": CONF.format(folder=folder), **FILES}.items():
            (folder / name).write_text(text)
        munge = {name: folder / f"munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")}
        options = [f"--{name}={path}" for name, path in munge.items()]
        self._daemon("n1", "munged", "--foreground", "--force", f"--key-file={folder / 'munge.key'}", *options)
        self._until(munge["socket"].exists, "munged")
        self._daemon("n1", "slurmctld", "-D")
        self._link_pmix()
        for i in range(1, 5):
            (folder / f"spool.n{i}").mkdir()
            self._daemon(f"n{i}", "slurmd", "-D")
        self._until(lambda: "4" in self.run("sinfo", "-h", "-t", "idle", "-p", "cpu", "-o", "%D").split(), "slurmd")

    def _link_pmix(self) -> None:
        """Debian's package has only libpmix.so.2: the hosts, and nobody else, see it under the other name too."""
        if not (PMIX / "libpmix.so.2").exists() or (PMIX / "libpmix.so").exists():
            return
        shutil.copytree(PMIX, self.folder / "pmix", symlinks=True)
        (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
        for i in range(1, 5):
            line = ["mount", "--bind", str(self.folder / "pmix"), str(PMIX)]
            subprocess.run(self.hosts.inside(f"n{i}", self.folder, line), check=True)

    def _daemon(self, host: str, *line: str) -> None:
        with open(self.folder / f"{line[0]}.{host}.out", "w") as output:
            inside = self.hosts.inside(host, self.folder, line)
            self._daemons.append(subprocess.Popen(inside, env=self.environ(), stdout=output, stderr=output))

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + UP_S
        while not holds():
            if time.monotonic() > deadline_s:
                logs = "".join(path.read_text()[-1000:] for path in self.folder.glob("*.out"))
                raise Unavailable(f"{what} does not come up:\n{logs}")
            time.sleep(0.05)

    def environ(self, **more: str) -> dict[str, str]:
        """What a user has: this Python first on the path, and nothing that says it runs in a job."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {"PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), "TMPDIR": "/dev/shm", **more}
        return {**launcher.outside(os.environ), **given}

    def run(self, *line: str, cwd: Path | None = None, **environ: str) -> str:
        """What this program says on head; it must succeed."""
        inside = self.hosts.inside("n1", cwd or self.folder, line)
        found = subprocess.run(inside, env=self.environ(**environ), capture_output=True, text=True, timeout=200)
        if found.returncode:
            raise AssertionError(f"{' '.join(line)}: status {found.returncode}\n{found.stdout}{found.stderr}")
        return found.stdout

    def submit(self, script: Path, cwd: Path, options: Sequence[str] = (), **environ: str) -> str:
        """Hand a script in, as a user does; the number of its job."""
        return self.run("sbatch", "--parsable", *options, str(script), cwd=cwd, **environ).strip()

    def show(self, job: str) -> Mapping[str, str]:
        """What Slurm says of a job; of a heterogeneous one, of its first component."""
        first, *_ = self.run("scontrol", "show", "job", job).split("\n\n")
        return dict(re.findall(r"(\w+)=(\S*)", first))

    def wait(self, job: str, *states: str, timeout_s: float = 200.0) -> Mapping[str, str]:
        """Wait until the job is in one of these states, or has ended if none is named; what Slurm then says of it."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.show(job))["JobState"] not in (states or ENDED):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"job {job} is {found['JobState']} ({found['Reason']}) after {timeout_s:.0f} s")
            time.sleep(0.1)
        return found

    def left(self, job: str, **environ: str) -> list[psutil.Process]:
        """What still runs of a job, on any host, with this in its environment."""
        mark, found = {"SLURM_JOB_ID": self.show(job)["JobId"], **environ}.items(), []
        for i in (i for i in range(1, 5) if psutil.pid_exists(self.hosts.pid(f"n{i}"))):  # others have vanished
            for process in processes(self.hosts, i):
                with contextlib.suppress(psutil.Error):  # it ended meanwhile; pid 1 there waits for none of them
                    if mark <= process.environ().items():
                        found.append(process)
        return found

    def close(self) -> None:
        """Take hosts and daemons away; harmless when repeated."""
        self.hosts.close()
        for daemon in self._daemons:
            daemon.wait(100)
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
