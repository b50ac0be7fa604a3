"""Devices that change during a run: slow workers and workers that leave.

Slow workers delay those that wait for them; no worker waits for one that has left.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.cli.rank_main import train
from hpcsync.config.job import Job
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Change
from tests.mpi.training import resume_run

PARADIGMS = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 2},
    "dssp": {"staleness_min": 1, "staleness_max": 4},
    "easgd": {"period": 1},
    "k-sync": {"k": "state", "cancel": "abort"},
}
RETURNING = {
    "k-async": {"k": 1},
    "ashl": {"warmup": 0, "profiled": 2, "steps_coarse": 2, "steps_fine": 1},
}
WAITING = ("bsp", "ssp", "dssp")  # for the slowest
SECONDS = 0.004


def run(
    comm: Any,
    folder: Any,
    paradigm: str,
    *events: dict[str, Any],
    updates: int = 10**6,
    resume: bool = False,
    **tables: Any,
) -> Trace:
    """The trace of a run on all ranks, after its audit; every worker's session must say that the run is over."""
    job = Job.from_table(
        {
            "name": "test",
            "seed": 3,
            "workload": {"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
            "optimizer": {"name": "sgd", "lr": 0.01},
            "stop": {"updates": updates},
            "paradigm": {"name": paradigm, **(PARADIGMS | RETURNING)[paradigm]},
            "cluster": {
                "workers": comm.size - 1,
                "compute": {"model": "constant", "seconds": SECONDS},
                "events": list(events),
            },
            **tables,
        }
    )
    session = resume_run(comm, job, folder) if resume else train(comm, job, folder)
    assert session.stopped
    weights = comm.allgather(session.flat.weights.numpy())
    assert all((other == weights[0]).all() for other in weights)
    assert [found for found in audit(folder / "trace.h5") if not found.passed] == []
    return load(folder / "trace.h5")


def pushes(trace: Trace, worker: int) -> np.ndarray:
    rows = trace.tables["pushes"]
    return rows[rows["worker"] == worker]


def leave(worker: int, **when: Any) -> dict[str, Any]:
    return {"worker": worker, "change": "leave", **when}


def join(worker: int, at_s: float) -> dict[str, Any]:
    return {"worker": worker, "change": "join", "at_s": at_s}


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_devices_that_change(comm, needs, folder, paradigm):
    """Worker 0 is slow for a while, the last one leaves early, and the others continue."""
    needs(3)
    last = comm.size - 2
    trace = run(
        comm,
        folder,
        paradigm,
        {"worker": 0, "at_iteration": 5, "change": "slow", "factor": 20.0},
        {"worker": 0, "at_iteration": 9, "change": "recover"},
        leave(last, at_iteration=13),
        *(leave(worker, at_iteration=31) for worker in range(last)),
    )
    took = pushes(trace, 0)["compute_s"]
    assert took.min() >= SECONDS
    assert took[4:8].min() >= 20 * SECONDS
    assert np.median(took[8:]) < 20 * SECONDS, "recovered"
    assert np.median(took[:4]) < 20 * SECONDS
    assert [len(pushes(trace, worker)) for worker in range(last + 1)] == [30] * last + [12]
    assert trace.tables["membership"]["worker"][0] == last or paradigm not in WAITING


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_run_ends_when_all_workers_have_left(comm, needs, folder, paradigm):
    """Workers leave by the job's clock or by their iterations, worker 0 before its first."""
    needs(2)
    others = [leave(w, **({"at_iteration": 5 + w} if w % 2 else {"at_s": 0.3})) for w in range(1, comm.size - 1)]
    trace = run(comm, folder, paradigm, leave(0, at_s=0.0), *others)
    assert trace.status == "finished"
    assert len(pushes(trace, 0)) == 0
    for worker in range(1, comm.size - 1):
        mine = pushes(trace, worker)
        if worker % 2:
            assert len(mine) == 4 + worker
        else:
            assert (mine["begin_s"] < 0.3).all()
    assert len(trace.tables["membership"]) == comm.size - 1


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "ssp", "k-async", "easgd", "ashl"])
def test_workers_that_return_or_join_late(comm, only, folder, paradigm):
    """The last worker leaves and returns, and worker 0 joins late, both within the loops of their scripts."""
    only(3)
    last = comm.size - 2
    for attempt, unit_s in enumerate((0.1, 0.4, 1.6, 6.4)):  # on a busy machine little happens in a while
        events = [join(0, at_s=2 * unit_s), leave(last, at_s=3 * unit_s), join(last, at_s=5 * unit_s)]
        trace = run(comm, folder / str(attempt), paradigm, *events, stop={"seconds": 8 * unit_s})
        changes = trace.tables["membership"]
        if (changes["change"] == Change.JOINED).sum() == 2:
            break
    for worker, joins_s in ((0, 2 * unit_s), (last, 5 * unit_s)):
        left, joined, ended = changes[changes["worker"] == worker]
        assert [row["change"] for row in (left, joined, ended)] == [Change.LEFT, Change.JOINED, Change.LEFT]
        assert joined["now_s"] >= joins_s - 1e-3  # the worker's clock and the server's agree to microseconds
        mine = pushes(trace, worker)
        assert not ((mine["end_s"] > left["now_s"]) & (mine["begin_s"] < joined["now_s"])).any()
        assert mine["iteration"].tolist() == list(range(1, len(mine) + 1))


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "easgd"])
def test_a_resumed_run_still_waits_for_absent_workers(comm, only, folder, paradigm):
    """The first checkpoint, from which the run is resumed, is made before worker 0 joins."""
    only(5)
    for attempt, unit_s in enumerate((0.1, 0.4, 1.6, 6.4)):  # on a busy machine little happens in a while
        first, again = folder / f"first{attempt}", folder / f"again{attempt}"
        late = join(0, at_s=6 * unit_s)
        tables = {"stop": {"seconds": 10 * unit_s}, "checkpoint": {"updates": 30, "keep": 9999}}
        run(comm, first, paradigm, late, **tables)
        if not (first / "checkpoints" / "1").exists():
            continue
        if comm.rank == 0:
            shutil.copytree(first, again)
            later = [path for path in (again / "checkpoints").iterdir() if path.name != "1"]
            for path in [*later, again / "summary.json", again / "weights.safetensors"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        comm.Barrier()
        trace = run(comm, again, paradigm, late, resume=True, **tables)
        changes = trace.tables["membership"][trace.tables["membership"]["worker"] == 0]
        resumed_s = trace.tables["starts"]["now_s"][1]
        if (changes["now_s"][changes["change"] == Change.JOINED] > resumed_s).any():
            break
    assert changes["change"].tolist() == [Change.LEFT, Change.JOINED, Change.LEFT]
    assert changes["now_s"][1] > resumed_s, "from a checkpoint before it joined"
    assert len(pushes(trace, 0)) > 0


def test_no_worker_joins_when_the_run_is_over(comm, needs, folder):
    needs(3)
    trace = run(comm, folder, "asp", leave(0, at_s=0.02), join(0, at_s=60.0), stop={"updates": 20})
    assert trace.tables["membership"]["change"].tolist() == [Change.LEFT] * (comm.size - 1)


def test_without_events_no_worker_leaves(comm, needs, folder):
    """Negative control of the tests above."""
    needs(2)
    trace = run(comm, folder, "asp", updates=40 * (comm.size - 1))
    assert all(len(pushes(trace, worker)) > 13 for worker in range(comm.size - 1))
    assert np.median(pushes(trace, 0)["compute_s"][4:8]) < 20 * SECONDS
