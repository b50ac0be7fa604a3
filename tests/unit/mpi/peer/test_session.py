"""Whole runs without servers: numbers, ends and traces."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from rich.console import Console
from safetensors.torch import load_file

import hpcsync
from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import BatchDivision
from hpcsync.core.peer_machine import create_method
from hpcsync.mpi.collectives import allreduce, bucket_reducer
from hpcsync.mpi.collectives.allreduce import MpiMean, RingMean, mean_vector
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.peer import session
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import Setup
from hpcsync.mpi.peer.gossip import Pushing
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.transport import shm_budget
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.messages import StepInfoKind
from hpcsync.mpi.transport.published_replica import PublishedReplica
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.planning.batch_allocation import Estimate
from hpcsync.simulator import sync_peers
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.optimizers import OptimizerSpec
from tests.mpi.training import alone, failures, on_some, one_process
from tests.plain import on_samples, whole_batches

ALLREDUCE = {"name": "allreduce"}
IN_STEP = {
    "allreduce": ALLREDUCE,
    "local-sgd": {"name": "local-sgd", "steps": 3},
    "diloco": {"name": "local-sgd", "steps": 3, "outer_lr": 0.7, "outer_momentum": 0.3},
    "permutation": {"name": "gossip", "mode": "permutation"},
    "pull-together": {"name": "gossip", "mode": "pull", "synchronous": True},
    "push-together": {"name": "gossip", "mode": "push", "synchronous": True, "period": 2},
    "push-sum-together": {"name": "gossip", "mode": "push-sum", "synchronous": True},
}
FREE = {
    "pull": {"name": "gossip", "mode": "pull"},
    "push": {"name": "gossip", "mode": "push", "period": 2},
    "push-sum": {"name": "gossip", "mode": "push-sum", "topology": "exponential"},
    "pull-ring": {"name": "gossip", "mode": "pull", "topology": "ring", "include_self": False},
    "ad-psgd": {"name": "ad-psgd"},
}
PARADIGMS = IN_STEP | FREE


def job(paradigm: dict[str, Any], workers: int, **tables: dict[str, Any]) -> Job:
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 8, "features": 11, "samples": 200},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
        "stop": {"updates": 40},
        "evaluation": {"every_samples": 100},
        "paradigm": paradigm,
        "cluster": {"workers": workers},
    }
    return Job.from_table({**table, **tables})


# ---- memory that ranks share ----

COPIES = {  # besides rows that the evaluation reads
    "allreduce": {1},  # the gradient
    "local-sgd": {1},  # what is averaged
    "permutation": {1},  # a peer's model
    "pull": {0},
    "push-sum": {2},  # slots
    "push": {2},
    "ad-psgd": {0, 2},  # a pair of rows on workers that share theirs
}


@pytest.fixture
def window_bytes(monkeypatch) -> Counter[int]:
    """Bytes of all windows that a rank has created, by rank."""
    found: Counter[int] = Counter()
    take = shm_budget.take

    def counting(among: Any, n_bytes: int) -> int:
        found[among.rank] += n_bytes
        return take(among, n_bytes)

    monkeypatch.setattr(shm_budget, "take", counting)
    return found


N_FEATURES = 20_000  # with which the windows of words count for nothing
LARGE = {"workload": {"name": "linear", "batch_size": 2, "features": N_FEATURES, "samples": 20}, "stop": {"updates": 4}}


def copies(comm, window_bytes: Counter[int]) -> set[int]:
    comm.Barrier()
    return {round(window_bytes[rank] / (8 * N_FEATURES)) for rank in range(comm.size)}


@pytest.mark.parametrize("every_samples", [100, 0])
@pytest.mark.parametrize("paradigm", COPIES)
def test_windows_hold_so_many_copies_of_the_model(comm, needs, folder, window_bytes, paradigm, every_samples):
    needs(2)
    on_some(comm, job(PARADIGMS[paradigm], comm.size, evaluation={"every_samples": every_samples}, **LARGE), folder)
    n_rows = 3 if paradigm == "pull" else 2 if every_samples else 1
    assert copies(comm, window_bytes) == {n_rows + others for others in COPIES[paradigm]}


@pytest.mark.parametrize("evaluated", ["by all", "by rank 0", "by none"])
@pytest.mark.parametrize("paradigm", ["allreduce", "pull", "push", "ad-psgd"])
def test_weights_are_published_if_they_are_read(comm, needs, folder, monkeypatch, paradigm, evaluated):
    needs(2)
    published: Counter[int] = Counter()
    publish = PublishedReplica.publish

    def counting(self: PublishedReplica, *args: Any) -> bool:
        published[self._rank] += 1
        return publish(self, *args)

    monkeypatch.setattr(PublishedReplica, "publish", counting)
    model, data = torch.nn.Linear(3, 1), torch.utils.data.TensorDataset(torch.ones(12 * comm.size, 3))
    optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), {**PARADIGMS[paradigm], "every_samples": 1}
    if evaluated == "by all" or (evaluated == "by rank 0" and comm.rank == 0):
        options["evaluate"] = lambda model: (1.0, 0.5)
    with hpcsync.connect(model, optimizer, options.pop("name"), comm=comm, out=folder / "run", **options) as sync:
        for (x,) in sync.shard(data, batch_size=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            sync.step(0.0)
    during_the_run = published[comm.rank] > 2  # at its begin and its end
    assert during_the_run == (evaluated != "by none" or paradigm == "pull")


def test_final_weights_are_published_before_a_worker_settles(comm, needs, folder, monkeypatch):
    """The final mean would contain the first weights of a worker that dies between the two."""
    needs(2)
    at_settling: list[int] = []
    send = PeerChannel.send_status

    def noting(self: PeerChannel, kind: int) -> None:
        if kind == StepInfoKind.SETTLED:
            at_settling.append(self.published.serial)
        send(self, kind)

    monkeypatch.setattr(PeerChannel, "send_status", noting)
    on_some(comm, job(PARADIGMS["push"], comm.size, evaluation={"every_samples": 0}), folder)
    assert at_settling and min(at_settling) > 1


@pytest.mark.parametrize(
    ("one_node", "on_death", "n_slots"), [(True, "end", 2), (True, "continue", 4), (False, "end", 4)]
)
def test_an_inbox_has_more_slots_where_adding_costs_more(comm, needs, window_bytes, one_node, on_death, n_slots):
    needs(2)
    this = job(PARADIGMS["push"], comm.size, cluster={"workers": comm.size, "on_death": on_death}, **LARGE)
    model = torch.nn.Linear(N_FEATURES, 1, dtype=torch.float64)
    link, flat = PeerChannel(comm, 1, torch.float64), FlatModel(model)
    link.backoff.one_node = one_node
    optimizer, layers = OptimizerSpec.of_job(this), Layers(comm, model)
    inbox = Pushing(Setup(this, create_method(this), link, flat, optimizer, layers, lambda: False, lambda: None))
    assert copies(comm, window_bytes) == {n_slots}
    inbox.free()
    link.free()


# ---- numbers, in float64 ----


@pytest.mark.parametrize("bucket_mb", [25.0, 0.00004])
def test_allreduce_equals_one_process_with_the_whole_batch(comm, folder, bucket_mb):
    this = job({**ALLREDUCE, "bucket_mb": bucket_mb}, comm.size)
    results = [on_some(comm, this, folder / str(repeat)) for repeat in range(2)]
    if comm.rank == 0:
        assert (results[0] == results[1]).all(), "bit for bit"
        np.testing.assert_allclose(results[0], one_process(this, comm.size), rtol=1e-12)
        assert not np.allclose(results[0], one_process(this, comm.size + 1), rtol=1e-6)  # the test can tell


@pytest.mark.parametrize("outer", [{}, {"outer_lr": 1.0, "outer_momentum": 0.0}])
def test_averaging_after_every_step_is_synchronous_sgd(comm, folder, outer):
    """Plain SGD only: the workers' momentum would have to be averaged too."""
    plain = {"name": "sgd", "lr": 0.05}
    this = job({"name": "local-sgd", "steps": 1, **outer}, comm.size, optimizer=plain, stop={"updates": 40 * comm.size})
    weights = on_some(comm, this, folder / "1")
    whole = on_some(comm, job(ALLREDUCE, comm.size, optimizer=plain), folder / "2")
    seldom = job({"name": "local-sgd", "steps": 5}, comm.size, optimizer=plain, stop=this.stop.model_dump())
    control = on_some(comm, seldom, folder / "3")
    if comm.rank == 0:
        np.testing.assert_allclose(weights, whole, rtol=1e-12)
        assert comm.size == 1 or not np.allclose(control, whole, rtol=1e-9)


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_one_worker_is_plain_sgd(comm, folder, paradigm):
    plain = {"name": "sgd", "lr": 0.05}
    if paradigm == "diloco":
        pytest.skip("one worker of it has an outer optimizer too")
    this = job(PARADIGMS[paradigm], 1, optimizer=plain)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        np.testing.assert_allclose(weights, one_process(this, 1), rtol=1e-12)


def test_one_worker_of_all_reduce_has_nesterovs_momentum(comm, folder):
    this = job(ALLREDUCE, 1)
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        np.testing.assert_allclose(weights, one_process(this, 1), rtol=1e-12)


@pytest.mark.parametrize("mode", ["pull", "permutation"])
def test_gossip_without_an_exchange_is_independent_runs(comm, folder, mode):
    plain = {"name": "sgd", "lr": 0.05}
    this = job(
        {"name": "gossip", "mode": mode, "period": 10**6}, comm.size, optimizer=plain, stop={"updates": 20 * comm.size}
    )
    weights = on_some(comm, this, folder)
    if comm.rank == 0:
        rows = load(folder / "trace.h5").tables["exchanges"]
        assert (rows["peer"] == NO_PEER).all()
        made = np.bincount(rows["worker"], minlength=comm.size)
        runs = [alone(this, worker, iterations) for worker, iterations in enumerate(made.tolist())]
        np.testing.assert_allclose(weights, np.mean(runs, axis=0), rtol=1e-12)
        if comm.size > 1:
            assert not np.allclose(weights, runs[0], rtol=1e-6)  # the test can tell


CONSERVING = {"gossip": {"mode": "push-sum", "include_self": False}, "ad-psgd": {}}


@pytest.mark.parametrize("paradigm", CONSERVING)
def test_the_weighted_mean_is_conserved(comm, folder, paradigm):
    """Without learning it stays that of the initial weights, whichever models were exchanged."""
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-300)
    data = torch.utils.data.TensorDataset(torch.ones(64 * comm.size, 3, dtype=torch.float64))
    options = {**CONSERVING[paradigm], "compute": {"model": "exponential", "seconds": 0.002}}
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm, **options) as sync:
        with torch.no_grad():
            model.weight.fill_(float(comm.rank))
        for (x,) in sync.shard(data, batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            sync.step(0.0)
    np.testing.assert_allclose(model.weight.detach().numpy(), (comm.size - 1) / 2, rtol=1e-9, atol=1e-12)


def test_leaving_between_backward_and_step_is_an_iteration(comm, folder):
    """Under all-reduce the others already have the gradient."""
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.ones(40 * comm.size, 3, dtype=torch.float64))
    with hpcsync.connect(model, optimizer, "allreduce", out=folder / "run", comm=comm) as sync:
        for number, (x,) in enumerate(sync.shard(data, batch_size=4)):
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            if number == 4 and comm.rank == 0:
                break
            sync.step(loss)
    if comm.rank == 0 and comm.size > 1:
        rows = load(folder / "run" / "trace.h5").tables["exchanges"]
        assert np.bincount(rows["worker"]).tolist() == [5] + [10] * (comm.size - 1)
        assert failures(folder / "run" / "trace.h5") == []


def test_queued_step_infos_are_not_taken_for_weights(comm, folder, monkeypatch):
    """The monitor stalls while more step infos than it can hold queue on the exchange's communicator."""
    stalls = [1.0]
    monkeypatch.setattr(RunRecorder, "chores", lambda *_, **__: time.sleep(stalls.pop() if stalls else 0.0))
    paradigm = {"name": "gossip", "mode": "permutation", "period": 50}
    this = job(paradigm, comm.size, evaluation={"every_samples": 0}, stop={"updates": 300 * comm.size})
    on_some(comm, this, folder)
    if comm.rank == 0:
        assert failures(folder / "trace.h5") == []
        assert np.isfinite(load(folder / "trace.h5").tables["exchanges"]["loss"]).all()


def ends_as_simulated(comm: MPI.Intracomm, this: Job, folder: Path) -> None:
    """Assert that the job has the bits of its simulation; with another seed, as the control, it has others."""
    weights = on_some(comm, this, folder / "real")
    if comm.rank == 0:
        for seed in (3, 4):
            assert simulate(this.model_copy(update={"seed": seed}), folder / str(seed), Console(quiet=True)) == 0
            tensors = load_file(folder / str(seed) / "weights.safetensors")
            simulated = np.concatenate([tensor.numpy().ravel() for _, tensor in sorted(tensors.items())])
            assert (weights == simulated).all() == (seed == 3)
            assert failures(folder / str(seed) / "trace.h5") == []
        real, made = (evaluated(folder / name / "trace.h5") for name in ("real", "3"))
        assert real.items() <= made.items(), "real ranks skip evaluations while one is running"


def evaluated(path: Path) -> dict[int, tuple[float, ...]]:
    """Return loss and consensus distance of each evaluated version."""
    rows = load(path).tables["evaluations"]
    return {int(row["version"]): row[["loss", "consensus_distance"]].item() for row in rows}


@pytest.mark.parametrize("paradigm", IN_STEP)
def test_synchronous_ranks_have_the_bits_of_simulated_ones(comm, folder, paradigm):
    """Each exchange is one of all workers, in any order of arrival: the same bits in both engines."""
    compute = {"model": "lognormal", "seconds": 0.001}
    this = job(IN_STEP[paradigm], comm.size, cluster={"workers": comm.size, "compute": compute})
    ends_as_simulated(comm, this, folder)


@pytest.mark.parametrize("paradigm", ["diloco", "permutation", "push-together"])
def test_steps_before_all_have_left_count_as_on_simulated_ranks(comm, folder, paradigm):
    """The first workers make 4 steps and the others 5; exchanges are due after every 3rd, or 2nd."""
    compute = {"model": "constant", "seconds": 0.001}
    events = [{"worker": w, "at_iteration": 6 if w else 5, "change": "leave"} for w in range(comm.size)]
    this = job(IN_STEP[paradigm], comm.size, cluster={"workers": comm.size, "compute": compute, "events": events})
    ends_as_simulated(comm, this, folder)


# ---- allocated batches ----


def sharing(workers: int, *, slowest_s: float = 0.024, leave: dict[int, int] | None = None, **tables: Any) -> Job:
    """Job of workers of which each takes twice as long as the previous one.

    `leave`: worker -> iteration in place of which it leaves.
    """
    seconds = [slowest_s / 2 ** (workers - 1 - worker) for worker in range(workers)]
    events = [{"worker": worker, "at_iteration": at, "change": "leave"} for worker, at in (leave or {}).items()]
    compute = {"compute": {"model": "constant", "seconds": seconds}} if slowest_s else {}
    batches = {"policy": "equal-finish", "predictor": "last", "interval": 4, "total": 9 * workers + 1, "gain": 0.0}
    cluster = {"workers": workers, "events": events, **compute}
    return job(tables.pop("paradigm", ALLREDUCE), workers, cluster=cluster, batches=batches, **tables)


@pytest.fixture
def foretold(monkeypatch):
    """Speeds do not depend on measurements: sizes are the same in both engines and change repeatedly."""

    class Foretelling:
        def __init__(self, worker):
            self.worker, self.n_observed = worker, 0

        def observe(self, n_samples, compute_s, comm_s):
            self.n_observed += 1
            return Estimate(0.001 * self.worker, 0.001 * 2.0 ** (self.worker * (1 + self.n_observed // 4 % 3)))

    for engine in (session, sync_peers):
        monkeypatch.setattr(engine, "estimator", lambda job, worker, *_: Foretelling(worker))


def batch_sizes(folder: Any) -> np.ndarray:
    """Return the batch sizes, shape (iterations, workers); 0 after a worker has left."""
    trace = load(folder / "trace.h5")
    rows = trace.tables["exchanges"]
    found = np.zeros((rows["iteration"].max(), trace.n_workers), int)
    found[rows["iteration"] - 1, rows["worker"]] = rows["batch_size"]
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["padded", "overlapping"])
@pytest.mark.parametrize("way", ["fastest", "mpi", "ring"])
def test_any_split_is_the_whole_batch(comm, folder, monkeypatch, foretold, way, overlap):
    if way != "fastest":
        kind = {"mpi": MpiMean, "ring": RingMean}[way]
        monkeypatch.setattr(allreduce, "SEGMENT_BYTES", 0)
        monkeypatch.setattr(bucket_reducer, "mean_vector", lambda comm, *of: kind(comm, *of, Backoff(comm)))
    assert bucket_reducer.mean_vector is mean_vector or way != "fastest"
    paradigm = {**ALLREDUCE, "bucket_mb": 0.00004}
    this = sharing(comm.size, slowest_s=0.0 if overlap else 1e-4, paradigm=paradigm)
    weights = on_some(comm, this, folder / "run")
    if way == "fastest":
        monkeypatch.setattr(BatchDivision, "weight", lambda self, worker: 1.0)
        unweighted = on_some(comm, this, folder / "control")
    if comm.rank == 0:
        sizes = batch_sizes(folder / "run")
        assert (sizes.sum(1) == this.batch_total).all()
        assert len(set(map(tuple, sizes.tolist()))) >= {1: 1, 8: 2}.get(comm.size, 3)
        expected = on_samples(this, whole_batches(this, 40))
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
        assert (
            way != "fastest" or comm.size == 1 or not np.allclose(unweighted, expected, rtol=1e-6)
        )  # the test can tell
        assert failures(folder / "run" / "trace.h5") == []


@pytest.mark.parametrize("leave", [{}, {0: 11}, {1: 20}], ids=str)
def test_shared_batches_are_those_of_simulated_ranks(comm, folder, foretold, leave):
    if leave and comm.size < 2:
        pytest.skip("at least one worker must stay")
    this = sharing(comm.size, slowest_s=1e-3, leave=leave)
    weights = on_some(comm, this, folder / "real")
    if comm.rank == 0:
        assert simulate(this, folder / "simulated", Console(quiet=True)) == 0
        tensors = load_file(folder / "simulated" / "weights.safetensors")
        simulated = np.concatenate([tensor.numpy().ravel() for _, tensor in sorted(tensors.items())])
        assert (batch_sizes(folder / "real") == batch_sizes(folder / "simulated")).all()
        real, virtual = (load(folder / kind / "trace.h5").tables["decisions"] for kind in ("real", "simulated"))
        assert len(real) == len(virtual)
        for name in set(real.dtype.names) - {"seq", "now_s", "controller"}:
            assert np.array_equal(real[name], virtual[name], equal_nan=True)
        if leave:  # without a worker the mean is corrected with one rounding more in one engine
            np.testing.assert_allclose(weights, simulated, rtol=1e-12)
        else:
            assert (weights == simulated).all()
        assert failures(folder / "real" / "trace.h5") == failures(folder / "simulated" / "trace.h5") == []


@pytest.mark.parametrize("leaver", [0, -1])
def test_the_others_take_over_the_samples_of_a_worker_that_left(comm, folder, monkeypatch, leaver):
    """Its samples are left out in the iteration in place of which it left, and in no other."""
    if comm.size < 2:
        pytest.skip("at least one worker must stay")
    worker = leaver % comm.size
    this = sharing(comm.size, leave={worker: 14}, stop={"updates": 24})
    weights = on_some(comm, this, folder / "run")
    if comm.rank == 0:
        sizes = batch_sizes(folder / "run")
        assert (sizes[:13, worker] > 0).all() and (sizes[13:, worker] == 0).all()
        assert (np.delete(sizes.sum(1), 13) == this.batch_total).all()
        steps = whole_batches(this, 24)
        decisions = load(folder / "run" / "trace.h5").tables["decisions"]
        mine = decisions[(decisions["worker"] == worker) & (decisions["iteration"] < 14)]
        before = sizes[13].copy()
        before[worker] = mine["chosen"][-1] if len(mine) else sizes[12, worker]
        begin = before[:worker].sum()
        steps[13] = np.delete(steps[13], np.s_[begin : begin + before[worker]])
        assert len(steps[13]) == sizes[13].sum()
        np.testing.assert_allclose(weights, on_samples(this, steps), rtol=1e-12)
        assert failures(folder / "run" / "trace.h5") == []


def test_slow_workers_get_small_batches(comm, folder):
    this = sharing(comm.size, stop={"updates": 30})
    on_some(comm, this, folder)
    if comm.rank == 0:
        assert failures(folder / "trace.h5") == []
        trace, sizes = load(folder / "trace.h5"), batch_sizes(folder)
        if comm.size > 1:
            assert len(trace.tables["decisions"]) > 0
            assert sizes[4:, 0].mean() > 1.2 * sizes[4:, -1].mean()


def test_a_script_shares_batches_and_takes_every_sample_once(comm, folder):
    """Two training epochs of a size that is no multiple of a batch."""
    n, torch_seed = 103, 1
    torch.manual_seed(torch_seed)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.utils.data.TensorDataset(torch.arange(float(n), dtype=torch.float64).unsqueeze(1))
    batches = {"policy": "proportional", "predictor": "last", "interval": 3, "total": 4 * comm.size, "gain": 0.0}
    compute = {"model": "constant", "seconds": [0.002 * (1 + worker) for worker in range(comm.size)]}
    seen: list[float] = []
    with hpcsync.connect(
        model, optimizer, "allreduce", out=folder / "run", comm=comm, batches=batches, compute=compute
    ) as sync:
        for _ in range(2):
            for (x,) in sync.shard(data, batch_size=4):
                optimizer.zero_grad()
                loss = model(x).sum()
                loss.backward()
                seen += x.flatten().tolist()
                sync.step(loss)
    everything = [number for of_rank in comm.allgather(seen) for number in of_rank]
    counts = np.bincount(np.array(everything, int), minlength=n)
    assert set(counts.tolist()) <= {2, 3} and counts.sum() - 2 * n < 4 * comm.size
    if comm.rank == 0 and comm.size > 1:
        assert failures(folder / "run" / "trace.h5") == []


# ---- traces ----


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_every_trace_shows_its_paradigm(comm, folder, paradigm):
    seconds = [0.002] * (comm.size - 1) + [0.004]
    compute = {"model": "lognormal", "seconds": seconds, "jitter": 0.5}
    this = job(
        PARADIGMS[paradigm], comm.size, cluster={"workers": comm.size, "compute": compute}, stop={"samples": 2400}
    )
    on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert trace.status == "finished"
        assert failures(folder / "trace.h5") == []
        exchanges, evaluations = trace.tables["exchanges"], trace.tables["evaluations"]
        assert exchanges["batch_size"].sum() >= 2400
        assert len(evaluations) >= 2
        assert evaluations["loss"][-1] < evaluations["loss"][0]
        if paradigm == "allreduce":
            assert (evaluations["consensus_distance"] == 0).all()
            assert (exchanges["peer"] == ALL_PEERS).all()
        elif comm.size > 1:
            assert (evaluations["consensus_distance"][:-1] > 0).any()


# ---- ends ----


@pytest.mark.parametrize("paradigm", ["allreduce", "local-sgd", "permutation", "pull", "push-sum", "ad-psgd"])
def test_workers_may_finish_at_different_times(comm, folder, paradigm):
    """Worker w makes 10 + 15 w iterations and leaves w / 8 s later; all end with the same weights."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(11, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(400, 11, dtype=torch.float64), torch.randn(400, 1, dtype=torch.float64)
    options = dict(PARADIGMS[paradigm])
    name = options.pop("name")
    with hpcsync.connect(model, optimizer, name, out=folder / "run", comm=comm, **options) as sync:
        for number, (i, j) in enumerate(sync.shard(torch.utils.data.TensorDataset(x, y), 4, epochs=None)):
            loss = torch.nn.functional.mse_loss(model(i), j)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)
            if number + 1 == 10 + 15 * comm.rank:
                break
        time.sleep(0.125 * comm.rank)
    weights = comm.allgather([p.detach().numpy() for p in model.parameters()])
    assert all((a == b).all() for other in weights for a, b in zip(other, weights[0], strict=True))
    if comm.size > 1 and comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        assert trace.status == "finished"
        rows = trace.tables["exchanges"]
        rows = rows[rows["batch_size"] > 0]
        assert np.bincount(rows["worker"], minlength=comm.size).tolist() == [10 + 15 * w for w in range(comm.size)]
        assert failures(folder / "run" / "trace.h5") == []


@pytest.mark.parametrize("paradigm", ["allreduce", "local-sgd", "pull", "push-sum", "ad-psgd"])
def test_time_ends_a_run(comm, folder, paradigm):
    this = job(PARADIGMS[paradigm], comm.size, stop={"seconds": 0.5})
    on_some(comm, this, folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert failures(folder / "trace.h5") == []
        assert 0.4 <= trace.tables["exchanges"]["end_s"].max() < 60.0
        if paradigm in IN_STEP:
            assert len(set(np.bincount(trace.tables["exchanges"]["worker"]).tolist())) == 1


def test_a_target_ends_a_run(comm, folder):
    this = job(FREE["pull"], comm.size, stop={"target_loss": 0.5, "samples": 10**6})
    on_some(comm, this, folder)
    if comm.rank == 0:
        evaluations = load(folder / "trace.h5").tables["evaluations"]
        assert (evaluations["loss"] <= 0.5).any()
        assert load(folder / "trace.h5").tables["exchanges"]["batch_size"].sum() < 10**6


# ---- scripts ----


def test_after_backward_the_gradient_is_the_mean(comm, folder):
    """A script can then clip it, as with DistributedDataParallel."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(4.0 * comm.size, dtype=torch.float64).reshape(-1, 2))
    seen = []
    with hpcsync.connect(model, optimizer, "allreduce", out=folder / "run", comm=comm) as sync:
        for (x,) in sync.shard(data, batch_size=2):
            optimizer.zero_grad()
            model(x).sum().backward()
            mean = np.mean(comm.allgather(x.sum(0).numpy()), axis=0)
            np.testing.assert_allclose(model.weight.grad.numpy()[0], mean)
            seen.append(1)
            sync.step(0.0)
    assert seen == [1]


def test_a_second_backward_in_one_step_is_refused(comm, folder):
    if comm.size == 1:
        pytest.skip("one process is the script's own training")
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.ones(4 * comm.size, 2, dtype=torch.float64))
    with hpcsync.connect(model, optimizer, "allreduce", out=folder / "run", comm=comm) as sync:
        for (x,) in sync.shard(data, batch_size=4):
            model(x).sum().backward()
            with pytest.raises(RuntimeError, match="several backward passes in one step"):
                model(x).sum().backward()
            sync.step(0.0)
