"""Evaluation and final model of models with running statistics: whose buffers they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file

import hpcsync
from hpcsync.api import ranks
from hpcsync.cli.rank_main import train as run_job
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check, optimizer_spec
from hpcsync.mpi.server.buffer_rows import BufferRows
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.trace.reader import load
from hpcsync.training.buffers import Buffers
from hpcsync.workloads.calibration import calibration
from tests.mpi.training import failures, on_some, resume_run
from tests.normalised import RESNET, SMALL, buffers, chosen, evaluated, in_step
from tests.unit.mpi.test_checkpoints import killed
from tests.unit.simulator.running import simulate

CHOICES = ("worker", "mean", "recompute")
TOGETHER: dict[str, dict[str, Any]] = {"bsp": {"name": "bsp"}, "allreduce": {"name": "allreduce"}}
APART: dict[str, dict[str, Any]] = {
    "asp": {"name": "asp"},
    "easgd": {"name": "easgd", "period": 2},
    "local-sgd": {"name": "local-sgd", "steps": 2},
    "gossip": {"name": "gossip", "mode": "pull"},
    "push-sum": {"name": "gossip", "mode": "push-sum"},
}
UPDATES = 6


def job(paradigm: dict[str, Any], n_ranks: int, choice: str = "worker", **tables: Any) -> Job:
    servers = 0 if paradigm["name"] in ("allreduce", "local-sgd", "gossip", "ad-psgd", "stanza") else 1
    workers = n_ranks - servers
    optimizer = {"name": "sgd", "lr": 0.1, **({} if paradigm["name"] == "async-diloco" else {"momentum": 0.9})}
    table = {
        "name": "test",
        "seed": 3,
        "workload": SMALL,
        "optimizer": optimizer,
        "stop": {"updates": UPDATES * (1 if paradigm["name"] in TOGETHER else workers)},
        "evaluation": {"every_samples": 4 * workers, "buffers": choice},
        "paradigm": paradigm,
        "cluster": {
            "servers": servers,
            "workers": workers,
            "compute": {"model": "constant", "seconds": 0.004},  # so that evaluations keep up
        },
    }
    return Job.from_table(table | tables)


def of_trace(path: Any) -> dict[int, tuple[float, float]]:
    """Loss and accuracy of the evaluated versions."""
    return {
        int(row["version"]): (float(row["loss"]), float(row["accuracy"])) for row in load(path).tables["evaluations"]
    }


# ---- in step: one process follows the run ----


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", TOGETHER)
def test_evaluations_are_with_the_chosen_buffers(comm, needs, folder, name, choice):
    needs(2 if name == "bsp" else 1)
    this = job(TOGETHER[name], comm.size, choice)
    on_some(comm, this, folder)
    if comm.rank > 0:
        return
    found = of_trace(folder / "trace.h5")
    assert UPDATES in found, "where the machine is busy, those before it may be left out"
    assert failures(folder / "trace.h5") == []
    for version, (model, of_workers) in enumerate(in_step(this, UPDATES), 1):
        losses = {c: evaluated(this, model, chosen(this, c, model, of_workers))[0] for c in CHOICES}
        if version in found:
            loss, accuracy = evaluated(this, model, chosen(this, choice, model, of_workers))
            assert found[version] == (pytest.approx(loss, rel=1e-9), accuracy)
            if len(of_workers) > 1:
                assert len({round(loss, 9) for loss in losses.values()}) == 3, "the test can tell"
    saved = load_file(folder / "weights.safetensors")
    expected = chosen(this, choice, model, of_workers)
    for key in saved.keys() & expected.keys():
        torch.testing.assert_close(saved[key], expected[key], rtol=1e-9, atol=1e-12)
    assert "1.running_mean" in saved


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", TOGETHER)
def test_simulated_runs_evaluate_as_real_ones(comm, needs, folder, name, choice):
    needs(2 if name == "bsp" else 1)
    this = job(TOGETHER[name], comm.size, choice)
    on_some(comm, this, folder / "real")
    if comm.rank == 0:
        workload = check(this)
        simulate(this, folder / "simulated.h5", workload)
        real, simulated = of_trace(folder / "real" / "trace.h5"), of_trace(folder / "simulated.h5")
        assert real.keys() <= simulated.keys()
        for version, (loss, accuracy) in real.items():
            assert simulated[version] == (pytest.approx(loss, rel=1e-12), accuracy)
        saved = load_file(folder / "real" / "weights.safetensors")
        for key, value in workload.model.state_dict().items():
            torch.testing.assert_close(saved[key], value, rtol=1e-12, atol=1e-14)


# ---- apart: the workers write down what they have ----


def train(comm: MPI.Intracomm, this: Job, folder: Any, history: dict[Any, Any], judged: list[Any]) -> Any:
    """Train in a script's loop; note every worker's buffers after each of its iterations, and those evaluated."""
    workload = check(this)

    def evaluate(model: torch.nn.Module) -> tuple[float, float]:
        judged.append(buffers(model))
        assert workload.evaluate is not None
        return workload.evaluate(model)

    model = workload.model
    calibrate = calibration(this, workload)
    with ranks.join(comm, this, model, optimizer_spec(this), evaluate, folder, None, calibrate) as sync:
        for x, y in sync.shard(workload.train, 4, epochs=None):
            sync.flat.zero_gradient()
            model.train()
            loss = workload.loss(model, x, y)
            loss.backward()
            history[sync.worker, int(model[1].num_batches_tracked)] = buffers(model)
            sync.step(loss)
        own = buffers(model)
    return sync, comm.gather(own if sync.worker is not None else None)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", APART)
def test_the_final_model_has_the_chosen_buffers(comm, needs, folder, name, choice):
    needs(2 if name in ("asp", "easgd") else 1)
    this = job(APART[name], comm.size, choice)
    judged: list[Any] = []
    sync, own = train(comm, this, folder, {}, judged)
    final = {key: value.clone() for key, value in sync._model.state_dict().items()}
    assert all(torch.equal(other[key], final[key]) for other in comm.allgather(final) for key in final)
    if comm.rank == 0:
        own = [each for each in own if each is not None]
        expected = chosen(this, choice, sync._model, own)
        for key, value in buffers(sync._model).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)
            assert torch.equal(judged[-1][key], value)
        loss, accuracy = evaluated(this, sync._model, expected)
        row = load(folder / "trace.h5").tables["evaluations"][-1]
        assert (float(row["loss"]), float(row["accuracy"])) == (pytest.approx(loss, rel=1e-9), accuracy)
        if choice == "recompute" or len(own) > 1:
            other = chosen(this, "worker" if choice != "worker" else "mean", sync._model, own)
            assert evaluated(this, sync._model, other)[0] != pytest.approx(loss, rel=1e-9), "the test can tell"
        assert load(folder / "trace.h5").job.evaluation.buffers == choice
        saved = load_file(folder / "weights.safetensors")
        assert all(torch.equal(saved[key], final[key]) for key in final)


@pytest.mark.parametrize("name", ["asp", "gossip"])
def test_evaluated_buffers_are_of_one_moment(comm, needs, folder, name, monkeypatch):
    """During the run they are those of worker 0 after one of its iterations, with servers after its latest push."""
    needs(2)
    history: dict[Any, Any] = {}
    judged: list[Any] = []
    train(comm, job(APART[name], comm.size), folder, history, judged)
    histories = comm.gather(history)
    if comm.rank == 0:
        of_worker_0 = {key[1]: value for each in histories for key, value in each.items() if key[0] == 0}
        assert len(judged) >= 2
        trace = load(folder / "trace.h5")
        for found, row in zip(judged, trace.tables["evaluations"], strict=True):
            n = int(found["1.num_batches_tracked"])
            if n == 0:
                continue
            assert all(torch.equal(found[key], value) for key, value in of_worker_0[n].items())
            if name == "asp":
                pushes = trace.tables["pushes"]
                seen = np.sum((pushes["worker"] == 0) & (pushes["now_s"] <= row["now_s"]))
                assert n >= seen


@pytest.mark.once
@pytest.mark.parametrize("choice", ["worker", "mean"])
def test_a_worker_that_has_left_does_not_count(comm, only, folder, choice):
    """Worker 0 leaves early; in virtual time too."""
    only(4)
    this = job(APART["asp"], comm.size, choice)
    events = [{"worker": 0, "at_iteration": 3, "change": "leave"}]
    this = job(APART["asp"], comm.size, choice, cluster=this.cluster.model_dump(exclude_none=True) | {"events": events})
    sync, own = train(comm, this, folder, {}, [])
    if comm.rank == 0:
        assert int(own[1]["1.num_batches_tracked"]) == 2 and failures(folder / "trace.h5") == []
        expected = chosen(this, choice, sync._model, own[2:])
        for key, value in buffers(sync._model).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-14)
        of_all = chosen(this, choice, sync._model, own[1:])
        assert not torch.allclose(of_all["1.running_mean"], expected["1.running_mean"]), "the test can tell"
        workload = check(this)
        simulate(this, folder / "simulated.h5", workload)
        assert int(buffers(workload.model)["1.num_batches_tracked"]) > 2


# ---- resume ----


@pytest.mark.parametrize("choice", ["worker", "mean"])
@pytest.mark.parametrize("name", TOGETHER)
def test_resumed_runs_evaluate_alike(comm, needs, folder, name, choice):
    needs(2 if name == "bsp" else 1)
    this = job(TOGETHER[name], comm.size, choice, checkpoint={"updates": 3, "keep": 9})
    on_some(comm, this, folder / "a")
    on_some(comm, this, killed(comm, folder / "a"), resume=True)
    if comm.rank == 0:
        assert_alike(folder)


def assert_alike(folder: Any) -> None:
    whole, resumed = (of_trace(folder / name / "trace.h5") for name in ("a", "a-killed"))
    assert UPDATES in whole.keys() & resumed.keys()
    assert all(whole[version] == resumed[version] for version in whole.keys() & resumed.keys())
    weights, others = (load_file(folder / name / "weights.safetensors") for name in ("a", "a-killed"))
    assert all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.mark.once
@pytest.mark.parametrize("forgotten", ["rows", "buffers"])
def test_buffers_that_are_not_restored_are_noticed(comm, only, folder, monkeypatch, forgotten):
    only(3)
    updates = {"rows": 5, "buffers": 3}[forgotten]  # after 5, only the pushes that wait in the checkpoint are left
    this = job(TOGETHER["bsp"], comm.size, "mean", checkpoint={"updates": updates, "keep": 9})
    on_some(comm, this, folder / "a")
    killed(comm, folder / "a")
    if forgotten == "rows":
        monkeypatch.setattr(BufferRows, "restore", lambda self, state: None)
    else:
        monkeypatch.setattr("hpcsync.mpi.session_base.restore_arrays", lambda live, saved: None)
    resume_run(comm, this, folder / "a-killed")
    if comm.rank == 0:
        with pytest.raises(AssertionError):
            assert_alike(folder)


# ---- the transport ----


@pytest.mark.once
def test_rows_that_a_worker_overwrites_are_noticed(comm, only, folder, monkeypatch):
    """With one row a worker, instead of two in turn, an evaluation may find buffers of a later push."""
    only(3)
    monkeypatch.setattr(BufferRows, "_begin", lambda self, worker, iteration: 2 * worker * self._n_words)
    rows = BufferRows(comm, 2, 3)
    if comm.rank > 0:
        for iteration in (1, 2):
            rows.put(comm.rank - 1, iteration, torch.full((3,), iteration))
    comm.Barrier()
    if comm.rank == 0:
        assert [row.tolist() for row in rows.latest([0, 1], [1, 1])] != [[1, 1, 1]] * 2
    monkeypatch.undo()
    comm.Barrier()
    rows.free()


@pytest.mark.once
def test_models_without_buffers_send_nothing(comm, only, folder, monkeypatch):
    only(2)
    puts = []
    monkeypatch.setattr(BufferRows, "put", lambda self, *row: puts.append(row))
    linear = {"name": "linear", "batch_size": 4, "features": 5, "samples": 60}
    on_some(comm, job(TOGETHER["bsp"], comm.size, workload=linear), folder / "without")
    assert not puts


# ---- every paradigm ----

EVERY: list[dict[str, Any]] = [
    *TOGETHER.values(),
    *APART.values(),
    {"name": "ssp", "staleness": 2},
    {"name": "dssp", "staleness_min": 1, "staleness_max": 4},
    {"name": "k-sync", "k": 1, "cancel": "abort"},
    {"name": "k-batch-sync", "k": 1},
    {"name": "k-async", "k": 1},
    {"name": "k-batch-async", "k": 1},
    {"name": "ashl", "warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5},
    {"name": "adsp", "check_period_s": 0.03, "interval_min_s": 0.005, "commits": 3},
    {"name": "async-diloco", "steps": 2, "grace_s": 0.002},
    {"name": "gossip", "mode": "push"},
    {"name": "gossip", "mode": "permutation"},
    {"name": "ad-psgd"},
    {"name": "stanza", "cut": "fc"},
]
IN_STEP = [*TOGETHER.values(), APART["local-sgd"], {"name": "gossip", "mode": "permutation"}, EVERY[-1]]


@pytest.mark.once
@pytest.mark.parametrize("paradigm", EVERY, ids=lambda each: "-".join(map(str, each.values())))
def test_a_resnet_can_be_evaluated_under_every_paradigm(comm, only, folder, paradigm):
    only(3)
    choice = "worker" if paradigm["name"] == "stanza" else "mean"
    this = job(paradigm, comm.size, choice, workload=RESNET, stop={"samples": 8 * comm.size * 4})
    run_job(comm, this, folder)  # under stanza ranks end with different layers
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert trace.status == "finished" and failures(folder / "trace.h5") == []
        assert np.isfinite(trace.tables["evaluations"]["loss"]).all()
        model = check(this).model
        initial = buffers(model)
        model.load_state_dict(load_file(folder / "weights.safetensors"))
        loss, accuracy = evaluated(this, model, buffers(model))
        row = trace.tables["evaluations"][-1]
        assert (float(row["loss"]), float(row["accuracy"])) == (pytest.approx(loss, rel=1e-9), accuracy)
        assert evaluated(this, model, initial)[0] != pytest.approx(loss, rel=1e-6), "the test can tell"
        simulated = of_trace(simulate(this, folder / "simulated.h5").path)
        assert all(np.isfinite(results).all() for results in simulated.values())
        if paradigm in IN_STEP:
            assert simulated[int(row["version"])] == (pytest.approx(loss, rel=1e-9), accuracy)


# ---- scripts ----


def test_a_script_says_how_to_recompute(comm, folder):
    """A single process evaluates the statistics that it recomputes, too, and keeps its own for training."""
    this = job({"name": "allreduce"}, 1)
    workload, calibrated = check(this), []

    def calibrate(model: torch.nn.Module) -> None:
        calibrated.append(1)
        torch.optim.swa_utils.update_bn([workload.train.tensors[0]], model)

    def evaluate(model: torch.nn.Module) -> tuple[float, float]:
        assert int(model[1].num_batches_tracked) == 1
        return 0.0, 0.0

    model = workload.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match='"recompute" needs calibrate, and no other choice takes it'):
        hpcsync.connect(model, optimizer, buffers="recompute", comm=comm, out=folder / "run")
    with pytest.raises(JobError, match='"recompute" needs calibrate, and no other choice takes it'):
        hpcsync.connect(model, optimizer, calibrate=calibrate, comm=comm, out=folder / "run")
    settings = {"buffers": "recompute", "calibrate": calibrate, "evaluate": evaluate, "every_samples": 4 * comm.size}
    with hpcsync.connect(model, optimizer, "bsp", **settings, comm=comm, out=folder / "run") as sync:
        n = 0
        for x, y in sync.shard(workload.train, batch_size=4):
            optimizer.zero_grad()
            model.train()
            loss = workload.loss(model, x, y)
            loss.backward()
            sync.step(loss)
            n += 1
            assert int(model[1].num_batches_tracked) == n
    assert int(model[1].num_batches_tracked) == 1
    expected = Buffers(model).packed()
    torch.optim.swa_utils.update_bn([workload.train.tensors[0]], model)
    assert torch.equal(Buffers(model).packed(), expected)
    assert bool(calibrated) == (comm.rank == 0)


@pytest.mark.once
def test_buffers_that_change_their_shape_are_refused(comm, only, folder, monkeypatch):
    only(1)
    model = check(job({"name": "allreduce"}, 1)).model
    found = Buffers(model)
    found.packed()
    model.register_buffer("late", torch.zeros(2))
    with pytest.raises(JobError, match="the model's buffers late have been added"):
        found.packed()


class Growing(torch.nn.Module):
    """Keeps all that it has seen."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(n, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.resize_(len(self.seen) + len(x), 4)  # as observers of quantisation do
        return self.layer(x)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "easgd"])
def test_a_buffer_that_grows_is_refused(folder, capsys, paradigm, n):
    """It would be broadcast in another length on each rank at the end."""

    def script(comm: Any) -> None:
        model = Growing(n)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hpcsync.connect(model, optimizer, paradigm, comm=comm, out=folder / "run") as sync:
            for (x,) in sync.shard(torch.utils.data.TensorDataset(torch.ones(48, 4)), batch_size=4):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    with pytest.raises((JobError, RankFailed)):
        run(3, script)
    line = "the model's buffers seen have been added, removed, or changed in shape or type since the run began"
    assert f"failed: {line}\n" in capsys.readouterr().err
