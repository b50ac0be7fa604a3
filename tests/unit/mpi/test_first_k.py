"""Updates of the first k: their contributors, their weights, and cancelled workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.config.job import Job
from hpcsync.core.coordinator import AccumulateCommand, UpdateCommand
from hpcsync.mpi.server.shard import encode
from hpcsync.mpi.transport import messages
from hpcsync.paradigms.records import Grant
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Outcome
from hpcsync.training.parameter_store import Store
from tests.mpi.training import alone, failures, on_some, recomputed, simulated
from tests.unit.jobs import make_job

SLOW_S = 0.4  # of an iteration, in which others make many; longer than one rank may begin after another


def job(workers: int, servers: int = 1, seconds: Any = None, updates: int = 30, **paradigm: Any) -> Job:
    compute = {} if seconds is None else {"compute": {"model": "constant", "seconds": seconds}}
    return make_job(
        seed=3,
        workload={"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
        optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.5},
        stop={"updates": updates},
        evaluation={"every_samples": 0},
        paradigm=paradigm,
        cluster={"servers": servers, "workers": workers, **compute},
    )


def servers_of(comm: Any) -> int:
    """Two, where that leaves workers enough that differ."""
    return 2 if comm.size > 3 else 1


def pushes(folder: Any, **columns: int) -> np.ndarray:
    rows = load(folder / "trace.h5").tables["pushes"]
    return rows[np.logical_and.reduce([rows[name] == value for name, value in columns.items()])]


# ---- weights ----


def test_k_equal_to_all_workers_is_bsp_to_the_bit(comm, needs, folder):
    needs(2)
    servers = servers_of(comm)
    workers = comm.size - servers
    bsp = on_some(comm, job(workers, servers, name="bsp"), folder / "bsp")
    for name in ("k-sync", "k-async"):
        found = on_some(comm, job(workers, servers, name=name, k=workers), folder / name)
        assert np.array_equal(found, bsp)
    in_pieces = on_some(comm, job(workers, servers, name="k-sync", k=workers, cancel="abort"), folder / "abort")
    assert np.allclose(in_pieces, bsp, rtol=0, atol=1e-12)
    if workers > 1:
        fewer = on_some(comm, job(workers, servers, name="k-sync", k=workers - 1), folder / "fewer")
        assert not np.allclose(fewer, bsp, rtol=0, atol=1e-6)
    if comm.rank == 0:
        assert all(failures(folder / name / "trace.h5") == [] for name in ("k-sync", "k-async", "abort"))


@pytest.mark.parametrize("name", ["k-async", "k-batch-async"])
def test_one_at_a_time_is_asp(comm, needs, folder, name):
    needs(2)
    one = on_some(comm, job(1, name=name, k=1), folder / "one")
    asp = on_some(comm, job(1, name="asp"), folder / "asp")
    assert one is None or np.array_equal(one, asp)
    workers = comm.size - 1
    weights = on_some(comm, job(workers, seconds=0.005, name=name, k=1), folder / "all")
    if comm.rank == 0:
        assert failures(folder / "all" / "trace.h5") == []
        trace = load(folder / "all" / "trace.h5")
        assert (trace.tables["updates"]["n_contributions"] == 1).all()
        taken = pushes(folder / "all", outcome=Outcome.APPLIED)
        assert len(taken) == 30  # how stale is exact only in virtual time: tests/unit/simulator/test_first_k.py
        assert (taken["staleness"].max() > 0) == (workers > 1)
        assert np.allclose(weights, recomputed(job(workers, seconds=0.005, name=name, k=1), trace), rtol=1e-11)


FAST_AND_SLOW = [
    ("k-sync", {"k": 1}),
    ("k-batch-sync", {"k": 3}),
    ("k-async", {"k": 1, "staleness_weight": "inverse"}),
    ("k-batch-async", {"k": 3}),
    ("k-batch-async", {"k": 3, "staleness_max": 1, "staleness_weight": "inverse"}),
]


def fast_and_slow(comm: Any, folder: Any, name: str, options: Any) -> tuple[Job, np.ndarray | None]:
    """Of three workers, of which the first is ten times as fast as the last; or as many as there are, at least two."""
    servers = servers_of(comm)
    workers = min(3, comm.size - servers)
    options = {**options, "k": min(options["k"], workers)}
    this = job(workers, servers, [0.003, 0.02, 0.03][:workers], updates=12, name=name, **options)
    return this, on_some(comm, this, folder)


@pytest.mark.parametrize(("name", "options"), FAST_AND_SLOW, ids=lambda x: x if isinstance(x, str) else str(x["k"]))
def test_weights_follow_from_the_contributions_in_the_trace(comm, needs, folder, name, options):
    needs(3)
    this, weights = fast_and_slow(comm, folder, name, options)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert np.allclose(weights, recomputed(this, trace), rtol=0, atol=1e-12)
        assert failures(folder / "trace.h5") == []
        assert (most_of_one_worker(trace) > 1) == ("batch" in name), "mini-batches of one worker in one update"


def most_of_one_worker(trace: Trace) -> int:
    """In one update."""
    taken = trace.tables["pushes"]
    taken = taken[taken["outcome"] == Outcome.APPLIED]
    of_update = np.stack([taken["version_read"] + taken["staleness"], taken["worker"]])
    return int(np.unique(of_update, axis=1, return_counts=True)[1].max())


@pytest.mark.parametrize(("name", "options"), [FAST_AND_SLOW[1], FAST_AND_SLOW[3]], ids=["sync", "async"])
def test_without_accumulation_a_workers_first_contribution_is_lost(comm, needs, folder, monkeypatch, name, options):
    needs(3)
    monkeypatch.setattr(Store, "accumulate", lambda self, worker, weight: self._has_read(worker))
    this, weights = fast_and_slow(comm, folder, name, options)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert not np.allclose(weights, recomputed(this, trace), rtol=0, atol=1e-4)


def test_a_slot_is_accumulated_before_its_worker_is_granted():
    collection, update = AccumulateCommand(0, 0.5), UpdateCommand((1,), (1.0,), 2.0, 0.1)
    records = encode([collection, Grant(0, 2, 7), update, Grant(1, 3, 8)])
    kinds = [(record.kind, record.grant.worker, record.weight) for record in records]
    assert kinds == [
        (messages.CommandKind.ACCUMULATE, 0, 0.5),
        (messages.CommandKind.PROMISE, 0, 1.0),
        (messages.CommandKind.UPDATE, 1, 1.0),
        (messages.CommandKind.PROMISE, 1, 1.0),
    ]
    assert records[2].divisor == 2.0


# ---- beside its simulation ----


def test_with_a_clear_order_of_workers_a_simulation_gives_the_same_bits(comm, needs, folder):
    """The first half of the workers is far ahead of the others, whose contributions are all late."""
    needs(2)
    workers = comm.size - 1
    k = max(1, workers // 2)
    clear = job(workers, seconds=[0.01] * k + [4 * SLOW_S] * (workers - k), updates=30, name="k-sync", k=k)
    equal = job(workers, seconds=0.001, name="k-sync", k=workers)
    for name, this in (("equal", equal), ("clear", clear)):
        weights = on_some(comm, this, folder / name)
        if comm.rank == 0:
            assert np.array_equal(weights, simulated(this))
    if comm.rank == 0 and k == 1:
        assert np.allclose(weights, alone(clear, 0, 30), rtol=0, atol=1e-12)
    if comm.rank == 0 and workers > 1:
        assert not np.allclose(weights, simulated(equal), rtol=0, atol=1e-6)


def weights_of(folder: Any, this: Job) -> np.ndarray:
    return recomputed(this, load(folder / "trace.h5"))


# ---- cancelling ----


def with_one_slow(workers: int, scale: int = 1) -> dict[str, Any]:
    return {"seconds": [SLOW_S * scale] + [0.01 * scale] * (workers - 1), "name": "k-sync", "k": workers - 1}


def early_of(slow: np.ndarray, slow_s: float) -> np.ndarray | None:
    """Return the iterations that were stopped early, if the slow worker was late in each."""
    early = slow[slow["share"] < 1]
    late = len(slow) >= 4 and len(early) >= len(slow) - 2  # only the end of the run stops nobody
    if late and (slow["outcome"] == Outcome.DROPPED).all() and (early["compute_s"] < 0.8 * slow_s).all():
        return early
    return None


def test_a_late_worker_is_stopped_early(comm, needs, folder):
    needs(3)
    workers = comm.size - 1
    for scale in (1, 4, 16):  # the pauses of busy cores are short beside the longest
        at, slow_s = folder / str(scale), SLOW_S * scale
        this = job(workers, cancel="abort", micro_batches=8, **with_one_slow(workers, scale))
        weights = on_some(comm, this, at)
        early = early_of(pushes(at, worker=0), slow_s) if comm.rank == 0 else None
        if comm.bcast(early is not None):
            break
    if comm.rank == 0:
        assert early is not None, "in no attempt was the slow worker late, and stopped, in each iteration"
        assert set(early["share"].tolist()) <= {piece / 8 for piece in range(1, 8)}
        assert (early["compute_s"] >= early["share"] * slow_s).all()
        assert (early["wire_bytes"] == 11 * 8).all(), "read, and nothing put"
        assert (pushes(at, outcome=Outcome.APPLIED)["share"] == 1).all()
        assert np.allclose(weights, weights_of(at, this), rtol=0, atol=1e-12)
        assert failures(at / "trace.h5") == []


def test_otherwise_it_completes_the_iteration(comm, needs, folder):
    needs(3)
    workers = comm.size - 1
    on_some(comm, job(workers, updates=15, **with_one_slow(workers)), folder)
    if comm.rank == 0:
        slow = pushes(folder, worker=0)
        assert (slow["share"] == 1).all() and (slow["compute_s"] >= SLOW_S).all()
        assert failures(folder / "trace.h5") == []


def script(comm: Any, folder: Any, asks: bool) -> tuple[torch.nn.Module, hpcsync.Session]:
    """A loop that computes its batches in four pieces; worker 0 is slow."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 6, generator=generator)
    data = TensorDataset(x, (x @ torch.arange(6.0)).unsqueeze(1))
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    workers = max(1, comm.size - 1)
    compute = {"model": "constant", "seconds": [SLOW_S * (workers > 1)] + [0.002] * (workers - 1)}
    options = {"k": max(1, workers - 1), "cancel": "abort", "stop": {"updates": 100}, "compute": compute}
    with hpcsync.connect(model, optimizer, "k-sync", **options, out=folder / "run", comm=comm) as sync:
        for x, y in sync.shard(data, batch_size=16, epochs=None):
            optimizer.zero_grad()
            for piece in range(4):
                rows = slice(4 * piece, 4 * (piece + 1))
                loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
                (loss / 4).backward()
                if asks and piece < 3 and sync.cancelled((piece + 1) / 4):
                    break
            sync.step(loss)
    return model, sync


@pytest.mark.flaky(reruns=3)  # after a pause of the process the slow worker may be in time
@pytest.mark.parametrize("asks", [True, False])
def test_a_script_may_check_between_its_pieces_but_need_not(comm, folder, asks):
    model, sync = script(comm, folder, asks)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in comm.allgather(weights))
    assert torch.allclose(model.weight, torch.arange(6.0), atol=0.1)
    if comm.size > 2 and sync.worker == 0:
        assert sync._engine.machine._cancelled >= 0, "what was sent was received"
    if comm.size > 2 and comm.rank == 0:
        slow = pushes(folder / "run", worker=0)
        assert (slow["outcome"] == Outcome.DROPPED).all()
        assert (slow["share"] < 1).any() == asks
        assert failures(folder / "run" / "trace.h5") == []


def test_a_share_of_nothing_or_of_all_is_refused(comm, folder):
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcsync.connect(model, optimizer, out=folder / "run", comm=comm) as sync:
        for share in (0.0, 1.0, -0.5, 1.5, float("nan")):
            with pytest.raises(ValueError, match=f"share = {share}: must be greater than 0 and less than 1"):
                sync.cancelled(share)
        assert not sync.cancelled(0.5)


# ---- an adaptive k, and workers that leave ----


@pytest.mark.parametrize(("name", "k"), [("k-sync", "state"), ("k-batch-async", "min")])
def test_k_is_chosen_from_push_infos(comm, needs, folder, name, k):
    """No worker waits for one that is far behind, and the audit chooses the same k."""
    needs(4)
    workers = comm.size - 1
    start = {"k_start": workers}
    this = job(workers, seconds=[0.02] + [0.002] * (workers - 1), updates=80, name=name, k=k, **start)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        decisions = trace.tables["decisions"]
        assert set(decisions["controller"].tolist()) == {b"k"} and decisions["chosen"][0] == workers - 1
        assert np.allclose(weights, recomputed(this, trace), rtol=0, atol=1e-12)
        assert failures(folder / "trace.h5") == []


@pytest.mark.parametrize("name", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_a_round_ends_when_a_worker_leaves_in_its_middle(comm, needs, folder, name):
    """All but the last worker wait for it, and it leaves; then k exceeds the number of workers."""
    needs(3)
    workers = comm.size - 1
    table = job(workers, seconds=[0.005] * (workers - 1) + [0.05], updates=20, name=name, k=workers).model_dump(
        exclude_none=True
    )
    leaving = {"worker": workers - 1, "change": "leave", "at_iteration": 3}
    this = Job.from_table({**table, "cluster": {**table["cluster"], "events": [leaving]}})
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert trace.status == "finished" and len(trace.tables["updates"]) == 20
        assert len(pushes(folder, worker=workers - 1)) == 2
        assert np.allclose(weights, recomputed(this, trace), rtol=0, atol=1e-12)
        assert failures(folder / "trace.h5") == []
