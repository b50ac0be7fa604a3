"""The scripts of slurm/, handed in as users do it, on a Slurm of four nodes; jobs/ holds jobs of a few seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.cli import finished_runs
from hpcsync.cli.slurm import mpi_of_this_python
from hpcsync.system.namespaces import Unavailable
from hpcsync.trace.reader import Trace, load
from tests.slurm.cluster import Slurm

REPOSITORY = Path(__file__).parents[2]
JOB = """
name = "{name}"
seed = 1
workload = {{name = "linear", features = 101, samples = 400, batch_size = 8}}
optimizer = {{name = "sgd", lr = 0.02}}
stop = {{updates = {updates}}}
evaluation = {{every_samples = 0}}
checkpoint = {{updates = 20}}
paradigm = {paradigm}
cluster = {cluster}
"""
ASP = '{name = "asp"}'
PADDED = '{compute = {model = "constant", seconds = 0.02}}'
ENDLESS = 1_000_000
ONE_A_NODE = "--ntasks-per-node=1"  # fewer ranks start sooner
LIMIT_S = 200.0  # on a busy machine

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Without the means to have one the tests are skipped."""
    try:
        slurm = Slurm()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with slurm:
        yield slurm


class Place:
    """A folder as a user works in: `slurm/`, for this Python's MPI, and jobs of the names that it speaks of."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "jobs").mkdir()
        for template in (REPOSITORY / "slurm").glob("*.sh"):
            text = template.read_text()
            (folder / template.name).write_text(text.replace("--mpi=pmix", f"--mpi={mpi_of_this_python()}"))

    def job(self, name: str, paradigm: str = '{name = "bsp"}', cluster: str = "{}", updates: int = 40) -> None:
        text = JOB.format(name=name, paradigm=paradigm, cluster=cluster, updates=updates)
        (self.folder / "jobs" / f"{name}.toml").write_text(text)

    def submit(self, script: str, *options: str) -> str:
        return self.slurm.submit(self.folder / script, self.folder, options)

    def run(self, job: str) -> Path:
        found = self.slurm.show(job)
        of_array = f"{found['ArrayJobId']}/{found['ArrayTaskId']}" if "ArrayTaskId" in found else None
        return self.folder / "runs" / f"{found['JobName']}-{of_array or found['JobId']}"

    def said(self, job: str) -> str:
        found = self.slurm.show(job)
        log = self.folder / f"{found['JobName']}-{found['JobId']}.out"
        return log.read_text() if log.exists() else ""

    def saved(self, job: str) -> list[int]:
        """The numbers of its checkpoints, which are 20 updates apart."""
        return [int(path.name) for path in (self.run(job) / "checkpoints").glob("*") if path.name.isdigit()]

    def trains(self, job: str) -> bool:
        """Whether it has got so far that there is a checkpoint."""
        return bool(self.saved(job))

    def end_once_restarted(self, job: str, name: str, paradigm: str) -> int:
        """Let an endless run, when it is resumed, end after so many updates."""
        updates = 20 * max(self.saved(job)) + 600
        self.job(name, paradigm, updates=updates)
        return updates

    def until(self, holds: Callable[[], bool], job: str, limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline_s, f"{self.slurm.show(job)}\n{self.said(job)}"
            time.sleep(0.2)

    def finished(self, job: str) -> Trace:
        """The trace of the run that this job has finished."""
        try:
            found = self.slurm.wait(job, timeout_s=LIMIT_S)
        except AssertionError as late:
            said = self.said(job)
            self.slurm.run("scancel", job)
            raise AssertionError(f"{late}; its output:\n{said}") from None
        assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), self.said(job)
        self.until(lambda: not self.slurm.left(job), job)
        trace = load(self.run(job) / "trace.h5")
        assert trace.status == "finished"
        assert [found for found in audit(trace) if not found.passed] == []
        return trace


@pytest.fixture
def place(slurm: Slurm, tmp_path: Path) -> Place:
    return Place(slurm, tmp_path)


def hosts(trace: Trace) -> list[str]:
    clocks = trace.tables["clocks"]
    return [host.decode() for host in clocks["host"][np.argsort(clocks["rank"], kind="stable")]]


def job_ids(trace: Trace) -> list[str]:
    return [job_id.decode() for job_id in trace.tables["starts"]["job_id"]]


@pytest.fixture(scope="module")
def limited(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, str]:
    """A job whose time will be over, on n1 and n2: begun early, since Slurm looks for such jobs twice a minute."""
    place = Place(slurm, tmp_path_factory.mktemp("limited"))
    place.job("digits-asp", ASP, PADDED, 5000)  # 100 s at least, for Slurm warns it 20 to 50 s after each start
    return place, place.submit("preemptible.sh", ONE_A_NODE, "--nodelist=n[1-2]", "--time=1", "--signal=TERM@10")


# ---- N ranks are one world ----


@pytest.mark.once
@pytest.mark.usefixtures("limited")
def test_an_array_trains_with_every_seed_and_paradigm(place: Place) -> None:
    place.job("digits-bsp", ASP)
    job = place.submit("array.sh", ONE_A_NODE, "--array=1,5")
    for task, paradigm, seed in ((1, "bsp", 2), (5, "ssp", 3)):
        trace = place.finished(f"{job}_{task}")
        assert (trace.attributes["paradigm"], trace.attributes["seed"]) == (paradigm, seed)
        assert job_ids(trace) == [f"{job}_{task}"]
    compared = finished_runs.grouped([place.run(f"{job}_1").parent])  # as `hpcsync compare runs/NAME-JOB` reads them
    assert {variant.label: list(runs) for variant, runs in compared.items()} == {"bsp": [2], "ssp": [3]}


@pytest.mark.once
def test_ranks_are_one_world_and_servers_lie_apart(place: Place) -> None:
    place.job("digits-dssp", cluster='{servers = 2, placement = "spread"}')
    job = place.submit("cpu.sh")
    trace = place.finished(job)
    assert (trace.attributes["n_servers"], trace.attributes["n_workers"]) == (2, 2)
    first, second, *others = hosts(trace)
    assert first != second
    assert others == [first, second]
    assert job_ids(trace) == [job]


@pytest.mark.once
def test_without_servers_on_nodes_with_gpus(place: Place) -> None:
    place.job("text-allreduce", '{name = "allreduce"}')
    assert hosts(place.finished(place.submit("gpu.sh", ONE_A_NODE))) == ["n3", "n4"]


def test_two_kinds_of_node_are_one_world(place: Place) -> None:
    place.job("digits-ssp", '{name = "ssp", staleness = 2}')
    job = place.submit("hetjob.sh")
    trace = place.finished(job)
    old, also_old, *new = hosts(trace)
    assert old == also_old in ("n1", "n2")
    assert new == ["n3", "n4"]
    assert job_ids(trace) == [job]


def test_singletons_are_refused_with_the_option_that_is_right(place: Place) -> None:
    place.job("digits-dssp")
    script, right = place.folder / "cpu.sh", f"--mpi={mpi_of_this_python()}"
    script.write_text(script.read_text().replace(right, "--mpi=none"))
    job = place.submit("cpu.sh", ONE_A_NODE)
    assert place.slurm.wait(job, timeout_s=LIMIT_S)["ExitCode"] == "2:0"
    said = place.said(job)
    assert f"2 processes were started, but each is a world of its own: start them with srun {right}, or " in said
    assert said.count("hpcsync: ") == 1
    assert not (place.folder / "runs").exists()


# ---- a job ends before its run ----


@pytest.mark.once
def test_what_is_cancelled_ends_in_order(place: Place) -> None:
    place.job("digits-dssp", cluster=PADDED, updates=ENDLESS)
    job = place.submit("cpu.sh", ONE_A_NODE)
    place.until(lambda: place.trains(job), job)
    place.slurm.run("scancel", job)
    assert place.slurm.wait(job)["JobState"] == "CANCELLED"
    place.until(lambda: not place.slurm.left(job), job)
    trace = load(place.run(job) / "trace.h5")
    assert trace.status == "interrupted"
    assert len(trace.tables["pushes"]) >= 20


def test_a_job_that_had_to_make_room_goes_on_from_its_checkpoint(place: Place) -> None:
    """On n3 and n4, for which a job of a partition that comes first asks."""
    place.job("digits-asp", ASP, PADDED, ENDLESS)
    job = place.submit("preemptible.sh", ONE_A_NODE, "--nodelist=n[3-4]")
    place.until(lambda: place.trains(job), job)
    updates = place.end_once_restarted(job, "digits-asp", ASP)
    first = ["--partition=cpu", "--nodelist=n[3-4]", "--nodes=2", "--exclusive", "--output=/dev/null"]
    (place.folder / "first.sh").write_text("#!/bin/sh\n")
    place.submit("first.sh", *first)
    place.until(lambda: place.slurm.show(job)["Restarts"] == "1", job)
    trace = place.finished(job)
    assert job_ids(trace) == [job, job]
    assert trace.tables["starts"]["now_s"][1] > 0
    pushes = trace.tables["pushes"]
    assert pushes["iteration"].tolist() == list(range(1, 1 + len(pushes)))
    assert len(pushes) >= updates
    assert "resuming from" in place.said(job)


@pytest.mark.once
def test_a_job_of_which_a_rank_was_killed_goes_on_from_its_checkpoint(place: Place) -> None:
    place.job("digits-asp", ASP, PADDED, ENDLESS)
    job = place.submit("preemptible.sh", ONE_A_NODE, "--nodelist=n[1-2]")
    place.until(lambda: place.trains(job), job)
    updates = place.end_once_restarted(job, "digits-asp", ASP)
    (worker,) = [process for process in place.slurm.left(job, SLURM_PROCID="1") if "python" in process.name()]
    worker.kill()
    place.until(lambda: place.slurm.show(job)["Restarts"] == "1", job)
    trace = place.finished(job)
    assert job_ids(trace) == [job, job]
    pushes = trace.tables["pushes"]
    assert pushes["iteration"].tolist() == list(range(1, 1 + len(pushes)))
    assert len(pushes) >= updates


@pytest.mark.once
def test_a_job_whose_time_is_over_goes_on_from_its_checkpoint(limited: tuple[Place, str]) -> None:
    place, job = limited
    place.until(lambda: "resuming from" in place.said(job), job, 2 * LIMIT_S)
    assert int(place.slurm.show(job)["Restarts"]) >= 1
    assert "hpcsync: interrupted; use --resume to resume from" in place.said(job)
    place.slurm.run("scancel", "--quiet", job)  # it may have finished


@pytest.mark.once
def test_jobs_of_which_a_node_vanishes_restart_with_the_ranks_that_are_left(slurm: Slurm, tmp_path: Path) -> None:
    """On n1, n2 and n4, of which n4 vanishes: the last test here."""
    begun: dict[str, tuple[Place, str]] = {}
    for paradigm in ("bsp", "allreduce"):
        (tmp_path / paradigm).mkdir()
        place = Place(slurm, tmp_path / paradigm)
        place.job("digits-bsp", f'{{name = "{paradigm}"}}', PADDED, ENDLESS)
        begun[paradigm] = place, place.submit("restart.sh", "--nodes=3", ONE_A_NODE, "--nodelist=n[1-2,4]")
    for place, job in begun.values():
        place.until(partial(place.trains, job), job)
    updates = {
        paradigm: place.end_once_restarted(job, "digits-bsp", f'{{name = "{paradigm}"}}')
        for paradigm, (place, job) in begun.items()
    }
    os.kill(slurm.hosts.pid("n4"), signal.SIGKILL)
    for paradigm, (place, job) in begun.items():
        trace = place.finished(job)
        assert "hpcsync: restarting 2 of 3 ranks" in place.said(job)
        assert slurm.show(job)["Restarts"] == "0", "inside the same allocation"
        assert job_ids(trace) == [job, job]
        assert set(hosts(trace)) == {"n1", "n2", "n4"}
        rows = trace.tables["pushes" if paradigm == "bsp" else "exchanges"]
        last_s = trace.tables["starts"]["now_s"][-1]
        assert set(rows["worker"][rows["now_s"] > last_s]) == set(range(1 if paradigm == "bsp" else 2))
        assert len(trace.tables["updates"]) >= updates[paradigm]
