"""The digits jobs from the command line to the files that a run leaves, started in both of the ways that there are."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hpcsync.audit.trace_audit import audit
from hpcsync.config import job as jobs
from hpcsync.config.job import Job
from hpcsync.simulator.recompute import NotRecomputed, recompute
from hpcsync.system import launcher
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import build
from tests.runs.processes import Program, ended, hpcsync, mpiexec

pytestmark = pytest.mark.once

JOBS = Path(__file__).parents[2] / "jobs"
SHORT = ("--set", "cluster.workers=2", "--set", "stop.target_accuracy=0.95")
EQUAL = (*SHORT, "--set", "cluster.compute.seconds=0.002")
UNEVEN = (*SHORT, "--set", "cluster.compute.seconds=[0.002, 0.004]")

RUNS = {"dssp": UNEVEN, "bsp": EQUAL}
BY_HPCSYNC = ("dssp",)


@dataclass(frozen=True)
class Trained:
    """A run that has ended, and what was asked for."""

    paradigm: str
    folder: Path
    program: Program

    @property
    def job(self) -> Job:
        return jobs.load(JOBS / f"digits-{self.paradigm}.toml", RUNS[self.paradigm][1::2])


def train(paradigm: str, folder: Path) -> Trained:
    arguments = ("run", JOBS / f"digits-{paradigm}.toml", *RUNS[paradigm], "--out", folder)
    if paradigm in BY_HPCSYNC:
        return Trained(paradigm, folder, ended(hpcsync(*arguments)))
    line = mpiexec(3, "-m", "mpi4py", "-m", "hpcsync", *arguments)
    return Trained(paradigm, folder, ended(line, environ=launcher.environment()))


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """All runs at a time."""
    folder = tmp_path_factory.mktemp("digits")
    with ThreadPoolExecutor(len(RUNS)) as pool:
        return {found.paradigm: found for found in pool.map(lambda name: train(name, folder / name), RUNS)}


@pytest.fixture(params=RUNS)
def trained(request: pytest.FixtureRequest, all_trained: dict[str, Trained]) -> Trained:
    return all_trained[request.param]


def test_a_run_succeeds_and_learns(trained: Trained) -> None:
    assert trained.program.status == 0, trained.program.err
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["best_accuracy"] >= 0.95


def test_it_tells_how_it_was_started_and_where_the_trace_is(trained: Trained) -> None:
    lines = trained.program.out.splitlines()
    assert lines[-1] == f"trace: {trained.folder / 'trace.h5'}"
    command = " ".join(launcher.command(3, ["python", "-m", "mpi4py", "-m", "hpcsync", "run"]))
    assert lines[0].startswith(f"starting 3 ranks: {command}") == (trained.paradigm in BY_HPCSYNC)
    assert sum(line.startswith("trace: ") for line in lines) == 1, "only one rank speaks"


def test_it_leaves_the_job_that_was_run(trained: Trained) -> None:
    assert {path.name for path in trained.folder.iterdir()} == {
        "trace.h5",
        "job.toml",
        "summary.json",
        "weights.safetensors",
        "status.json",
    }
    assert jobs.load(trained.folder / "job.toml") == trained.job
    assert load(trained.folder / "trace.h5").job == trained.job


def test_its_weights_load_into_the_model_and_are_as_good_as_said(trained: Trained) -> None:
    workload = build(trained.job)
    workload.model.load_state_dict(load_file(trained.folder / "weights.safetensors"))
    assert workload.evaluate is not None
    loss, accuracy = workload.evaluate(workload.model)
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert accuracy == summary["final_accuracy"]
    assert loss == pytest.approx(summary["final_loss"], rel=1e-5)
    assert accuracy > workload.evaluate(build(trained.job).model)[1] + 0.5


def test_its_trace_passes_the_audit(trained: Trained) -> None:
    assert [check for check in audit(trained.folder / "trace.h5") if not check.passed] == []


def test_every_bit_follows_from_its_trace(trained: Trained) -> None:
    """Real ranks under an asynchronous paradigm never run twice alike; their trace says how they ran."""
    trace = load(trained.folder / "trace.h5")
    if trained.paradigm in ("gossip", "ad-psgd"):
        with pytest.raises(NotRecomputed):
            recompute(trace)
        return
    assert [(check.passed, check.detail) for check in recompute(trace)] == [(True, "bit by bit")] * 3


def test_hpcsync_audit_says_so(all_trained: dict[str, Trained]) -> None:
    program = ended(hpcsync("audit", all_trained["dssp"].folder / "trace.h5"))
    assert program.status == 0, program.out
    assert "checks passed" in program.out


def test_a_second_run_into_the_same_folder_is_refused(all_trained: dict[str, Trained]) -> None:
    folder = all_trained["dssp"].folder
    before = contents(folder)
    program = ended(hpcsync("run", JOBS / "digits-dssp.toml", "--out", folder))
    assert program.status == 2
    assert program.out == ""
    assert program.err.splitlines() == [
        f"hpcsync: out {folder}: must not hold a trace.h5 already: runs are never overwritten"
    ]
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
