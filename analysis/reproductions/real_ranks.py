"""Run many jobs on real ranks that are started once, one job after the other: as a rank, with a file of folders.

Every folder holds its job in `asked.toml`. A job that needs fewer ranks than there are leaves the last ones idle.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.system import launcher
from hpcsync.system.namespaces import Hosts
from reproductions.simulating import finished, make_empty

if TYPE_CHECKING:
    from mpi4py import MPI

ANALYSIS = Path(__file__).parents[1]
ASKED = "asked.toml"
LOAD = "load"  # of the machine at the end of a run, over a minute, the ranks' own included
CONGESTION = "reno"  # shares a link evenly
BURST = "16kb"  # small beside a model of 20 to 60 kB
TIMEOUT_S = 7200.0
IDLE_S = 0.02  # between two looks of an idle rank


def run_all(jobs: Mapping[str, Job], out: Path, link: str | None = None) -> int:
    """Run the jobs that are not finished in out/NAME, in their order; return how many.

    Parameters
    ----------
    jobs, out
        What is run, and the folder.
    link
        Each rank is on a host of its own with a link of this rate, in tc's words; None: all on this machine.

    Raises
    ------
    CalledProcessError
        If a run fails.
    """
    todo = {out / name: job for name, job in jobs.items() if not finished(out / name, job)}
    if not todo:
        return 0
    for folder, job in todo.items():
        make_empty(folder)
        (folder / ASKED).write_text(job.to_toml(), encoding="utf-8")
    (out / "todo.json").write_text(json.dumps([str(folder.absolute()) for folder in todo]), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ANALYSIS), str(ANALYSIS.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = max(job.cluster.ranks for job in todo.values())
    program = [sys.executable, "-m", "mpi4py", "-m", "reproductions.real_ranks", str((out / "todo.json").absolute())]
    with (out / "ranks.log").open("a", encoding="utf-8") as log:
        if link is None:
            line = [sys.executable, "-m", "hpcsync", "launch", "-n", str(ranks), "--", *program]
            subprocess.run(line, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)
        else:
            with Hosts(ranks, rate=link, congestion=CONGESTION, burst=BURST) as hosts:
                line = [*hosts.mpiexec(range(1, ranks + 1)), "-n", str(ranks), *program]
                own = launcher.environment(environment | {"MPIEXEC": shlex.join(line)})
                done = hosts.run(line, ANALYSIS.parent, own, TIMEOUT_S)
                log.write(done.stdout + done.stderr)
                done.check_returncode()
    return len(todo)


def main(comm: MPI.Intracomm, todo: Path) -> None:
    """Train this rank's part of every job. Collective; an exception ends all ranks, if mpi4py runs the module."""
    from mpi4py import MPI

    from hpcsync.cli.rank_main import train

    for folder in map(Path, json.loads(todo.read_text(encoding="utf-8"))):
        job = Job.from_toml((folder / ASKED).read_text(encoding="utf-8"))
        some = comm.Split(0 if comm.rank < job.cluster.ranks else MPI.UNDEFINED, comm.rank)
        if some != MPI.COMM_NULL:
            train(some, job, folder)
            some.Free()
            if comm.rank == 0:
                (folder / layout.WEIGHTS).unlink()
                (folder / LOAD).write_text(f"{os.getloadavg()[0]}\n", encoding="utf-8")
        done = comm.Ibarrier()
        while not done.Test():  # an idle rank would take a core in a call that blocks
            time.sleep(IDLE_S)


if __name__ == "__main__":
    from mpi4py import MPI as mpi

    main(mpi.COMM_WORLD, Path(sys.argv[1]))
