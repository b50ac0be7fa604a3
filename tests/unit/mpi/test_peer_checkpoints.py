"""Runs without servers that are resumed from a checkpoint, against uninterrupted ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpcsync
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi.collectives.bucket_reducer import BucketReducer
from hpcsync.mpi.peer import session as peer_session
from hpcsync.mpi.peer.pairs import Pairing
from hpcsync.mpi.transport.push_inbox import PushInbox
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.state import Stateful
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Change
from hpcsync.training.local_update import Outer, Peer
from hpcsync.training.optimizers import LocalOptimizer
from tests.mpi.training import failures, on_some, one_process, resume_run
from tests.plain import on_batches
from tests.unit.mpi.test_checkpoints import ADAM, NESTEROV, SGD, TOP_K, both, killed
from tests.unit.mpi.test_stanza import job as separated
from tests.unit.mpi.test_stanza import run

ALLREDUCE = {"name": "allreduce"}
DILOCO = {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.3}
PERMUTATION = {"name": "gossip", "mode": "permutation", "period": 2}
NETWORK = {"name": "tests.mpi.network:convolutional", "batch_size": 4}  # with a matrix that can be factored
FREE: dict[str, dict[str, Any]] = {
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push", "period": 2},
    "push-sum": {"name": "gossip", "mode": "push-sum", "topology": "exponential", "include_self": False},
    "ad-psgd": {"name": "ad-psgd"},
}


def job(paradigm: dict[str, Any], workers: int, optimizer: Any = SGD, **tables: Any) -> Job:
    """Job of about 30 iterations per worker, with a checkpoint every 12."""
    each = 1 if paradigm["name"] in ("allreduce", "stanza") else workers
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 4, "features": 11, "samples": 200},
        "optimizer": optimizer,
        "stop": {"updates": 30 * each},
        "evaluation": {"every_samples": 50},
        "checkpoint": {"updates": 12 * each, "keep": 9},
        "paradigm": paradigm,
        "cluster": {"workers": workers, "compute": {"model": "lognormal", "seconds": 0.003}},
    }
    return Job.from_table(table | tables)


# ---- the same bits as without an interruption ----

EXACT: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "allreduce": (ALLREDUCE, NESTEROV, {}),
    "allreduce-top-k": (ALLREDUCE, SGD, {"compression": TOP_K}),
    "allreduce-powersgd": (ALLREDUCE, SGD, {"compression": {"name": "powersgd", "rank": 1}, "workload": NETWORK}),
    "local-sgd": ({"name": "local-sgd", "steps": 3}, NESTEROV, {}),
    "diloco": (DILOCO, NESTEROV, {}),
    "permutation": (PERMUTATION, NESTEROV, {}),
    "push-sum-together": ({"name": "gossip", "mode": "push-sum", "synchronous": True}, NESTEROV, {}),
}


@pytest.mark.parametrize("which", EXACT)
def test_a_resumed_run_gives_the_same_bits(comm, folder, which):
    paradigm, optimizer, tables = EXACT[which]
    this = job(paradigm, comm.size, optimizer, **tables)
    weights, resumed = both(comm, this, folder)
    if comm.rank == 0:
        assert (weights == resumed).all()
        assert not failures(folder / "a-killed" / "trace.h5")


@pytest.mark.once
def test_checkpoints_change_nothing(comm, only, folder):
    only(3)
    often = on_some(comm, job(DILOCO, comm.size, ADAM), folder / "often")
    never = on_some(comm, job(DILOCO, comm.size, ADAM, checkpoint={"seconds": 0}), folder / "never")
    if comm.rank == 0:
        assert (often == never).all()
        assert not (folder / "never" / "checkpoints").exists()


class Foretelling(Stateful):
    """Speeds that do not depend on measurements: sizes change repeatedly, and are the same in every run."""

    state_types = {"n_observed": int}

    def __init__(self, worker: int) -> None:
        self.worker, self.n_observed = worker, 0

    def observe(self, n_samples: int, compute_s: float, comm_s: float) -> Estimate:
        self.n_observed += 1
        return Estimate(0.001 * self.worker, 0.001 * 2.0 ** (self.worker * (1 + self.n_observed // 4 % 3)))


def sharing(workers: int, paradigm: dict[str, Any] = ALLREDUCE) -> Job:
    batches = {"policy": "equal-finish", "predictor": "last", "interval": 4, "total": 9 * workers + 1, "gain": 0.0}
    return job(paradigm, workers, batches=batches)


@pytest.fixture
def foretold(monkeypatch):
    monkeypatch.setattr(peer_session, "estimator", lambda job, worker, *_: Foretelling(worker))


@pytest.mark.once
def test_allocated_batches_resume(comm, only, folder, foretold):
    only(3)
    this = sharing(comm.size)
    weights, resumed = both(comm, this, folder)
    if comm.rank == 0:
        assert (weights == resumed).all()
        assert not failures(folder / "a-killed" / "trace.h5")
        assert comm.size == 1 or len(load(folder / "a-killed" / "trace.h5").tables["decisions"]) > comm.size


def test_separated_layers_resume(comm, needs, folder):
    needs(2)
    this = separated(comm.size, ADAM, updates=20, checkpoint={"updates": 8, "keep": 9})
    weights = [run(comm, this, folder / "a")[1][0]]
    session = resume_run(comm, this, killed(comm, folder / "a"))
    weights.append(torch.cat([p.detach().flatten() for p in session._model.parameters()]).cpu().numpy())
    if comm.rank == 0:
        assert np.array_equal(*weights)
        assert not failures(folder / "a-killed" / "trace.h5")


FORGOTTEN = {
    "optimizer": (LocalOptimizer, "allreduce"),
    "residual": (BucketReducer, "allreduce-top-k"),
    "outer": (Outer, "diloco"),
}


@pytest.mark.once
@pytest.mark.parametrize("what", FORGOTTEN)
def test_state_not_restored_changes_the_bits(comm, only, folder, monkeypatch, what):
    only(3)
    owner, which = FORGOTTEN[what]
    paradigm, optimizer, tables = EXACT[which]
    monkeypatch.setattr(owner, "restore", lambda self, state: None)
    weights, resumed = both(comm, job(paradigm, comm.size, optimizer, **tables), folder)
    if comm.rank == 0:
        assert (weights != resumed).any()


# ---- asynchronous gossip ----


@pytest.mark.parametrize("mode", ["pull", "push-sum", "ad-psgd"])
def test_resumed_gossip_loses_nothing(comm, folder, mode):
    this = job(FREE[mode], comm.size)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert not failures(folder / "a" / "trace.h5")
        assert not failures(torn / "trace.h5")
        before, after = load(torn / "trace.lost-1.h5"), load(torn / "trace.h5")
        begin_s = after.tables["starts"]["now_s"]
        assert len(begin_s) == 2
        for table in ("exchanges", "updates", "evaluations"):
            n_kept = np.searchsorted(after.tables[table]["now_s"], begin_s[1])
            assert after.tables[table][:n_kept].tobytes() == before.tables[table][:n_kept].tobytes()
        assert (after.tables["exchanges"]["begin_s"][n_kept + comm.size :] >= 0).all()


@pytest.mark.once
@pytest.mark.parametrize("longer", [True, False], ids=["longer", "the same rule"])
@pytest.mark.parametrize("paradigm", [ALLREDUCE, FREE["pull"]], ids=["allreduce", "pull"])
def test_a_run_that_was_over_at_its_checkpoint_resumes_with_a_longer_rule(
    comm, only, folder, monkeypatch, paradigm, longer
):
    """The rule held while the workers halted; by the same rule the run is still over."""
    only(3)
    this = job(paradigm, comm.size)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    restore = PeerCoordinator.restore
    monkeypatch.setattr(PeerCoordinator, "restore", lambda self, state: restore(self, {**state, "stopping": True}))
    n_updates = this.stop.updates + 10 * longer
    on_some(comm, job(paradigm, comm.size, stop={"updates": n_updates}), torn, resume=True)
    if comm.rank == 0:
        assert (len(load(torn / "trace.h5").tables["updates"]) >= n_updates) == longer


@pytest.mark.once
def test_lost_push_sum_weight_is_found_in_the_trace(comm, only, folder, monkeypatch):
    only(3)
    this = job(FREE["push-sum"], comm.size)
    on_some(comm, this, folder / "a")
    restore = Peer.restore
    monkeypatch.setattr(Peer, "restore", lambda self, state: restore(self, {**state, "weight": state["weight"] / 2}))
    torn = killed(comm, folder / "a")
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert [found.name for found in failures(torn / "trace.h5")] == ["push-sum weights add up"]


@pytest.mark.once
def test_lost_averages_are_found_in_the_trace(comm, only, folder, monkeypatch):
    only(3)
    this = job(FREE["ad-psgd"], comm.size)
    on_some(comm, this, folder / "a")
    restore = Pairing.restore
    monkeypatch.setattr(
        Pairing, "restore", lambda self, state: restore(self, {**state, "n_steps": state["n_steps"] / 2})
    )
    torn = killed(comm, folder / "a")
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert [found.name for found in failures(torn / "trace.h5")] == [
            "averages are atomic, of two workers, and lose no step"
        ]


@pytest.mark.once
@pytest.mark.parametrize("put_back", [True, False])
def test_received_models_are_absorbed_once(comm, only, put_back):
    """Also in a resumed run, which has another inbox; without restoring they are lost."""
    only(3)
    with PushInbox(comm, 2, torch.float64) as before, PushInbox(comm, 2, torch.float64) as after:
        to = (comm.rank + 1) % comm.size
        before.send(to, torch.tensor([1.0, 2.0], dtype=torch.float64), 0.25)
        comm.Barrier()
        kept = before.keep()
        comm.Barrier()
        for inbox in (before, after):
            inbox.send(to, torch.tensor([10.0, 20.0], dtype=torch.float64), 0.5)
        comm.Barrier()
        if put_back:
            after.put_back(kept._replace(total=kept.total.clone()))  # as from a checkpoint
        for inbox in (before, after):
            total, count, weight = inbox.collect()
            lost = inbox is after and not put_back
            assert (total.tolist(), count, weight) == (([10, 20], 1, 0.5) if lost else ([11, 22], 2, 0.75))
            assert inbox.collect() is None
        comm.Barrier()


# ---- after a worker has ended ----


@pytest.mark.once
@pytest.mark.parametrize(
    ("paradigm", "leaver"), [(ALLREDUCE, 0), (DILOCO, -1), (FREE["push"], -1)], ids=["allreduce", "diloco", "push"]
)
def test_there_is_no_checkpoint_after_a_worker_has_ended(comm, only, folder, paradigm, leaver):
    """That worker could not resume from it; the others continue."""
    only(3)
    events = [{"worker": leaver % comm.size, "at_iteration": 2, "change": "leave"}]
    this = job(paradigm, comm.size, cluster={"workers": comm.size, "events": events})
    on_some(comm, this, folder)
    if comm.rank == 0:
        assert not failures(folder / "trace.h5")
        assert not list((folder / "checkpoints").glob("[0-9]*"))


@pytest.mark.once
def test_workers_that_have_halted_continue_if_another_one_ends_instead(comm, only, folder):
    """It learns of the halt after its last step."""
    only(3)
    model = torch.nn.Linear(3, 1)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), torch.utils.data.TensorDataset(torch.ones(600, 3))
    how = {"mode": "push", "checkpoint": {"updates": 6}, "out": folder / "run", "comm": comm}
    with hpcsync.connect(model, optimizer, "gossip", **how) as sync:
        for step, (x,) in enumerate(sync.shard(data, batch_size=4), 1):
            sync.step(backward(model(x).mean()))
            if sync.worker == 1:
                limit_s = time.monotonic() + 100
                while not sync._link.halt_requested and time.monotonic() < limit_s:
                    time.sleep(1e-3)
                    sync._link.poll_commands()
                break
            if step == 40:
                break
    if comm.rank == 0:
        assert not failures(folder / "run" / "trace.h5")
        exchanges = load(folder / "run" / "trace.h5").tables["exchanges"]
        assert np.bincount(exchanges["worker"][exchanges["batch_size"] > 0]).tolist() == [40, 1, 40]
        assert not list((folder / "run" / "checkpoints").glob("*"))


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


# ---- with fewer workers ----

FEWER = {
    "allreduce": (ALLREDUCE, {}),
    "top-k": (ALLREDUCE, {"compression": TOP_K}),
    "local-sgd": (DILOCO, {}),
    "push-sum": (FREE["push-sum"], {}),
    "ad-psgd": (FREE["ad-psgd"], {}),
}


def with_fewer(comm: MPI.Intracomm, this: Job, folder: Path, n_ranks: int) -> np.ndarray | None:
    """Return the result of resuming the run in this folder with this many ranks; None on the others."""
    fewer = comm.Split(0 if comm.rank < n_ranks else MPI.UNDEFINED)
    if fewer == MPI.COMM_NULL:
        return None
    weights = resume_run(fewer, this, folder).flat.weights.numpy().copy()
    fewer.Free()
    return weights


@pytest.mark.once
@pytest.mark.parametrize("which", FEWER)
def test_a_run_resumes_with_fewer_workers(comm, only, folder, which):
    """The result is as if the others had left."""
    only(3)
    paradigm, tables = FEWER[which]
    this = job(paradigm, comm.size, **tables)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    weights = with_fewer(comm, this, torn, comm.size - 1)
    if comm.rank == 0:
        assert not failures(torn / "trace.h5")
        trace = load(torn / "trace.h5")
        change = trace.tables["membership"][0]
        assert (change["worker"], change["change"]) == (comm.size - 1, Change.DIED)
        made = np.bincount(trace.tables["exchanges"]["worker"])
        assert made[-1] < made[:-1].min()
        if which == "allreduce":
            steps = [[i * comm.size + w for w in range(comm.size) if i < made[w]] for i in range(made[0])]
            np.testing.assert_allclose(weights, on_batches(this, steps), rtol=1e-12)
            assert not np.allclose(weights, one_process(this, comm.size), rtol=1e-6)


@pytest.mark.once
def test_samples_of_missing_workers_are_allocated_to_the_others(comm, only, folder, foretold):
    only(3)
    this = sharing(comm.size)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    with_fewer(comm, this, torn, comm.size - 1)
    if comm.rank == 0:
        assert not failures(torn / "trace.h5")
        rows = load(torn / "trace.h5").tables["exchanges"]
        assert rows["batch_size"][rows["iteration"] == 30].sum() == this.batch_total


@pytest.mark.once
@pytest.mark.parametrize("paradigm", [PERMUTATION, ALLREDUCE], ids=["permutation", "allreduce"])
def test_a_refused_resume_is_reported_in_one_line(comm, only, folder, paradigm):
    """If all workers are needed; and for additional workers, which have no state to resume from."""
    only(3)
    this = job(paradigm, comm.size)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    if paradigm is ALLREDUCE:
        longer = job(paradigm, comm.size, stop={"updates": 50})
        with_fewer(comm, longer, torn, comm.size - 1)
        if comm.rank == 0:
            for name in ("summary.json", "weights.safetensors"):
                (torn / name).unlink()
        comm.Barrier()
        with pytest.raises(JobError, match=f"^--resume: {comm.size} ranks: must be at most"):
            resume_run(comm, longer, torn)
    else:
        smaller = job(paradigm, comm.size - 1)
        expected = f"^cluster.workers = {comm.size - 1}: must be {comm.size}, as it was when the run began"
        if comm.rank < comm.size - 1:
            with pytest.raises(JobError, match=expected):
                on_some(comm.Split(0), smaller, torn, resume=True)
        else:
            comm.Split(1)
