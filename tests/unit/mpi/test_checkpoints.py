"""Runs resumed from a checkpoint, compared with runs that were not interrupted."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpcsync
from hpcsync.compression import ErrorFeedback
from hpcsync.config.job import Job
from hpcsync.core.coordinator import Coordinator
from hpcsync.mpi.rank0.checkpointing import Checkpointer
from hpcsync.mpi.server.leader import Leader
from hpcsync.mpi.server.shard import Shard
from hpcsync.report.summary import summarize
from hpcsync.run_dir import checkpoint, layout, lock, status_file
from hpcsync.run_dir.checkpoint_files import read_manifest, read_part
from hpcsync.trace.reader import load
from hpcsync.trace.schema import Change
from hpcsync.training import rng_state, update_rules
from tests.counting import Counting
from tests.mpi.training import failures, on_some, resume_run
from tests.plain import committed

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
NESTEROV = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01}
TOP_K = {"name": "top-k", "ratio": 0.3}

PARADIGMS = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 2},
    "dssp": {"staleness_min": 1, "staleness_max": 4},
    "easgd": {"period": 3},
    "k-sync": {"k": "min", "cancel": "abort"},
    "k-batch-sync": {"k": "loss"},
    "k-async": {"k": "state"},
    "k-batch-async": {"k": "min", "k_start": 1},
    "ashl": {"warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5},
    "adsp": {"check_period_s": 0.03, "interval_min_s": 0.005, "commits": 3},
    "async-diloco": {"steps": 3, "momentum_every": 4, "momentum_between": 0.1, "grace_s": 0.002},
}
SEARCH = {"name": "adsp", "check_period_s": 0.02, "interval_min_s": 0.004, "search_every_s": 0.05, "loss": "evaluation"}
UPDATES = 18


def job(paradigm: str, workers: int, servers: int = 1, optimizer: Any = SGD, **tables: Any) -> Job:
    seconds = [0.002 * (1 + (w == 1)) for w in range(workers)]
    table = {
        "name": "test",
        "seed": 3,
        "workload": {"name": "linear", "batch_size": 4, "features": 11, "samples": 200},
        "optimizer": optimizer,
        "stop": {"updates": UPDATES},
        "evaluation": {"every_samples": 50},
        "checkpoint": {"updates": 7, "keep": 9},
        "paradigm": {"name": paradigm, **PARADIGMS[paradigm]},
        "cluster": {"servers": servers, "workers": workers, "compute": {"model": "lognormal", "seconds": seconds}},
    }
    return Job.from_table(table | tables)


def killed(comm: MPI.Intracomm, finished: Path, n_checkpoints: int = 1) -> Path:
    """Create what the run in this folder would have left, had it been killed after so many checkpoints.

    The trace has later rows.
    """
    folder = finished.with_name(f"{finished.name}-killed")
    if comm.rank == 0:
        shutil.copytree(finished, folder)
        later = [p for p in (folder / "checkpoints").iterdir() if int(p.name) > n_checkpoints]
        for path in [*later, folder / "summary.json", folder / "weights.safetensors"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    comm.Barrier()
    return folder


# ---- the same as without an interruption ----

EXACT = [("bsp", SGD, {}), ("bsp", ADAM, {}), ("bsp", SGD, {"compression": TOP_K})]
EXACT_ALONE = [
    ("asp", SGD, {}),
    ("easgd", NESTEROV, {}),
    ("k-batch-async", ADAM, {}),
    ("ashl", NESTEROV, {}),
    ("async-diloco", NESTEROV, {}),
]


def both(comm: MPI.Intracomm, this: Job, folder: Path) -> tuple[Any, Any]:
    """The weights without and with an interruption; None on ranks that take no part."""
    return on_some(comm, this, folder / "a"), on_some(comm, this, killed(comm, folder / "a"), resume=True)


@pytest.mark.parametrize(("paradigm", "optimizer", "tables"), EXACT + EXACT_ALONE)
def test_a_resumed_run_has_the_same_bits(comm, needs, folder, paradigm, optimizer, tables):
    needs(2)
    servers = 2 if comm.size > 3 else 1
    workers = comm.size - servers if paradigm == "bsp" else 1
    weights, resumed = both(comm, job(paradigm, workers, servers, optimizer, **tables), folder)
    if comm.rank == 0:
        assert (weights == resumed).all()


FORGOTTEN = {
    "optimizer": (update_rules.Descent, "restore", lambda self, state: None, {}),
    "residual": (ErrorFeedback, "restore", lambda self, state: None, {"compression": TOP_K}),
    "contributions": (Checkpointer, "deferred", lambda self: set(), {}),
}


@pytest.mark.once
@pytest.mark.parametrize("what", FORGOTTEN)
def test_state_that_is_not_restored_changes_the_bits(comm, only, folder, monkeypatch, what):
    only(3)
    owner, name, forgetful, tables = FORGOTTEN[what]
    monkeypatch.setattr(owner, name, forgetful)
    weights, resumed = both(comm, job("bsp", comm.size - 1, **tables), folder)
    if comm.rank == 0:
        assert (weights != resumed).any()


def save_once(monkeypatch, when: Callable[[Coordinator], bool]) -> None:
    """Let the first checkpoint begin after the first message that makes this true, as after a signal."""
    handle = Leader._handle

    def asking(self: Leader, now_s: float, record: tuple[Any, ...]) -> None:
        handle(self, now_s, record)
        if when(self._coordinator) and self._saver.number == 0:
            self._saver.ask(suspending=False)

    monkeypatch.setattr(Leader, "_handle", asking)


@pytest.mark.once
@pytest.mark.parametrize("forgets", [False, True], ids=["", "without-contribution"])
def test_a_contribution_that_waits_for_others_is_saved(comm, only, folder, monkeypatch, forgets):
    """The first checkpoint begins between the pushes of an update, as after a signal; without it, it is the control."""
    only(3)
    save_once(monkeypatch, lambda coordinator: bool(coordinator._pending))
    if forgets:
        monkeypatch.setattr(Coordinator, "is_pending", lambda self, worker: False)
    weights, resumed = both(comm, job("bsp", comm.size - 1), folder)
    if comm.rank == 0:
        assert forgets != (weights == resumed).all()


@pytest.mark.once
@pytest.mark.parametrize("n_fewer", [0, 1], ids=["all", "without-the-fastest"])
@pytest.mark.parametrize("forgets", [False, True], ids=["", "without-contribution"])
def test_a_commit_that_the_gate_keeps_back_is_saved(comm, only, folder, monkeypatch, n_fewer, forgets):
    """The first checkpoint is made while the last worker's commit waits; plain torch obtains the weights by the trace.

    If that worker is then absent, its commit is applied as it leaves.
    """
    only(5)
    gate = {"name": "ashl", "staleness": 0, "commit": "after-gate"}
    short = {"warmup": 0, "profiled": 2, "steps_coarse": 1, "loss_preset": 1e9}
    workers, last = comm.size - 1, comm.size - 2
    save_once(monkeypatch, lambda coordinator: coordinator.is_pending(last))
    for scale in (1, 2, 4, 8, 16):  # the pauses of busy cores are short beside the longest
        run, seconds = folder / str(scale), [0.02 * scale] * last + [0.007 * scale]
        cluster = {
            "servers": 1,
            "workers": workers,
            "compute": {"model": "constant", "seconds": seconds},
            "events": [{"worker": 0, "at_iteration": 5, "change": "slow", "factor": 4.0}],  # for whom all then wait
            "workers_min": last,
        }
        tables = {"cluster": cluster, "checkpoint": {"updates": 999, "keep": 9}, "stop": {"updates": 60}}
        given = job("ashl", workers, optimizer={"name": "sgd", "lr": 0.05}, **tables)
        this = Job.from_table({**given.model_dump(exclude_none=True), "paradigm": gate | short})
        on_some(comm, this, run)
        if comm.bcast(checkpoint.newest(run)) is not None:
            break
    else:
        pytest.fail("in no attempt did the commit come last")
    if comm.rank == 0:
        assert last in read_part(checkpoint.newest(run), "server-0")["kept"]
    if forgets:
        monkeypatch.setattr(Shard, "_restore_slots", lambda self, workers, saved: None)
    torn = killed(comm, run)
    there = comm.Split(0 if comm.rank < comm.size - n_fewer else MPI.UNDEFINED)
    if there != MPI.COMM_NULL:
        weights = resume_run(there, this, torn).flat.weights.cpu().numpy()
        if comm.rank == 0:
            trace = load(torn / "trace.h5")
            assert failures(torn / "trace.h5") == []
            assert forgets != np.allclose(weights, committed(this, trace), rtol=1e-9, atol=1e-12)
        there.Free()
    comm.Barrier()


def script(comm: MPI.Intracomm, out: Path, paradigm: str, *, resume: bool = False) -> torch.Tensor:
    """A loop with training epochs of its own, and a model that draws and that has running statistics."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
    )
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    every = {"updates": 7, "keep": 9}
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, checkpoint=every, resume=resume) as sync:
        torch.manual_seed(1000 + comm.rank)
        for _ in range(4):
            for x, y in sync.shard(data, batch_size=4):
                loss = torch.nn.functional.mse_loss(model(x), y)
                sgd.zero_grad()
                loss.backward()
                sync.step(loss)
            torch.rand(1)  # as the iterator of a DataLoader does, with which a script validates
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("forgets", [False, True], ids=["", "without-generators"])
def test_a_script_resumes_in_its_own_loop(comm, only, folder, monkeypatch, paradigm, forgets):
    """It resumes in the same epoch, at the same batch, with its generators; without these it is the control."""
    only(3)
    if forgets:
        monkeypatch.setattr(rng_state, "restore", lambda states, device: None)
    finished = script(comm, folder / "a", paradigm)
    resumed = script(comm, killed(comm, folder / "a", 2), paradigm, resume=True)  # in a later epoch
    assert forgets != torch.equal(finished, resumed)


class Decaying(Counting):
    """Decays its learning rate, too."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9
        return loss


@pytest.mark.parametrize(("paradigm", "options"), [("bsp", {}), ("allreduce", {}), ("local-sgd", {"steps": 2})])
def test_what_a_step_changes_in_its_groups_is_resumed(comm, only, folder, paradigm, options):
    """A scheduler that changes the same number, where it may, passes through an epoch that is over once more."""
    only(3)

    def counted(out: Path, resume: bool = False) -> torch.Tensor:
        torch.manual_seed(5)
        model = torch.nn.Linear(3, 1)
        counting = Decaying(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(counting, 1.0 if paradigm == "bsp" else 0.5)
        given = {**options, "checkpoint": {"updates": 4, "keep": 9}, "resume": resume}
        with hpcsync.connect(model, counting, paradigm, comm=comm, out=out, **given) as sync:
            for _ in range(2):
                for (x,) in sync.shard(torch.utils.data.TensorDataset(torch.ones(42, 3)), batch_size=2):
                    counting.zero_grad()
                    model(x).square().mean().backward()
                    counting.step()
                schedule.step()
        numbers = [counting.param_groups[0][key] for key in ("k", "weight_decay", "lr")]
        return torch.cat([*(p.detach().flatten() for p in model.parameters()), torch.tensor(numbers)])

    finished = counted(folder / "a")
    assert torch.equal(finished, counted(killed(comm, folder / "a", 2), resume=True))  # in the second epoch


def momentum_encoder(comm: MPI.Intracomm, out: Path, paradigm: str, options: Any, resume: bool) -> torch.Tensor:
    """A loop whose gradients depend on a moving average of the weights and on weights that nothing changes."""
    torch.manual_seed(5)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("query", "key", "fixed")})
    model["key"].seen = torch.nn.Parameter(torch.tensor(0), requires_grad=False)
    data = torch.utils.data.TensorDataset(torch.randn(40, 3))
    sgd = torch.optim.SGD(model["query"].parameters(), lr=0.05)
    given = {**options, "checkpoint": {"updates": 4, "keep": 9}, "resume": resume}
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, **given) as sync:
        for (x,) in sync.shard(data, batch_size=2, epochs=2):
            with torch.no_grad():
                for q, k in zip(model["query"].parameters(), model["key"].parameters(), strict=False):
                    k.data = k.data * 0.9 + q.data * 0.1
                model["key"].seen += len(x)
            loss = (model["query"](x) - 2 * model["key"](x) + model["fixed"](x)).square().mean()
            sgd.zero_grad()
            loss.backward()
            sync.step(loss)
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.parametrize(("paradigm", "options"), [("bsp", {}), ("allreduce", {}), ("local-sgd", {"steps": 2})])
def test_a_moving_average_in_the_model_is_resumed(comm, only, folder, paradigm, options):
    only(3)
    finished = momentum_encoder(comm, folder / "a", paradigm, options, False)
    torn = killed(comm, folder / "a")
    (part,) = (torn / "checkpoints").glob("*/worker-0.json")
    untrained = read_part(part.parent, part.stem)["untrained"]
    assert untrained["changed"].keys() == {"key.weight", "key.bias", "key.seen"}
    assert untrained["same"].keys() == {"fixed.weight", "fixed.bias"}
    assert torch.equal(finished, momentum_encoder(comm, torn, paradigm, options, True))


def evaluated(comm: MPI.Intracomm, out: Path, paradigm: str, accuracy: float, **how: bool) -> None:
    """A run that evaluates to this accuracy."""
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    given = {"stop": {"target_accuracy": 0.9, "updates": 24}, "checkpoint": {"updates": 7, "keep": 9}}
    given |= {"compute": {"model": "constant", "seconds": 0.002}, "every_samples": 8}
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    judged = lambda model: (0.5, accuracy)  # noqa: E731
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, evaluate=judged, **given, **how) as sync:
        for x, y in sync.shard(data, batch_size=4, epochs=None):
            sgd.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            sync.step()


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_that_an_evaluation_had_an_accuracy_is_known_after_a_resume(comm, only, folder, paradigm):
    """Otherwise one without ends the run, as the first one does (the control is in `test_registry.py`)."""
    only(2)
    evaluated(comm, folder / "a", paradigm, 0.5)
    torn = killed(comm, folder / "a", 2)
    evaluated(comm, torn, paradigm, math.nan, resume=True)
    if comm.rank == 0:
        has_one = ~np.isnan(load(torn / "trace.h5").tables["evaluations"]["accuracy"])
        assert has_one[0] and not has_one[-1]


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_run_that_evaluated_seldom_resumes_with_more_evaluations(comm, only, folder, paradigm):
    only(3)
    seldom = job("bsp", comm.size - 1, evaluation={"every_samples": 10**6}).model_dump(exclude_none=True)
    if paradigm == "allreduce":
        seldom |= {"paradigm": {"name": paradigm}, "cluster": {"workers": comm.size}}
    often = seldom | {"evaluation": {"every_samples": 30}}
    on_some(comm, Job.from_table(seldom), folder / "a")
    torn = killed(comm, folder / "a")
    on_some(comm, Job.from_table(often), torn, resume=True)
    if comm.rank == 0:
        before, after = (load(run / "trace.h5").tables["evaluations"] for run in (folder / "a", torn))
        assert len(before) == 1 < len(after)


# ---- the trace ----


@pytest.mark.once
@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_the_trace_is_continuous_across_a_restart(comm, needs, folder, paradigm):
    needs(5)
    this = job(paradigm, comm.size - 2, servers=2)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert not failures(torn / "trace.h5")
        before, after = load(torn / "trace.lost-1.h5"), load(torn / "trace.h5")
        starts = after.tables["starts"]
        assert starts["start"].tolist() == [0, 1]
        for table in ("grants", "updates", "evaluations"):
            kept = after.tables[table]["now_s"] < starts["now_s"][1]
            assert after.tables[table][kept].tobytes() == before.tables[table][: kept.sum()].tobytes()
        assert 7 <= len(after.tables["updates"][after.tables["updates"]["now_s"] < starts["now_s"][1]]) < UPDATES
        assert after.tables["clocks"]["start"].tolist() == [0] * comm.size + [1] * comm.size
        shown, expected = status_file.read(torn).workers, summarize(after).workers
        for name, whole in (("staleness", "staleness_mean"), ("wait", "wait_share"), ("compute", "compute_share")):
            values = getattr(shown, name), [getattr(worker, whole) for worker in expected]
            np.testing.assert_allclose(*np.array(values, float), atol=0.001)


@pytest.mark.once
@pytest.mark.parametrize("forgets", [False, True], ids=["", "without-points"])
def test_a_search_that_waits_for_an_evaluation_is_resumed(comm, only, folder, monkeypatch, forgets):
    """The first checkpoint begins when all workers have stopped; without what the search has seen it is the control.

    Nothing has been seen at the end of the first trial if the evaluation with which the run begins is still running.
    """
    only(3)
    save_once(monkeypatch, lambda coordinator: bool(coordinator._paradigm._points and not coordinator.computing))
    never = {"updates": 10**6, "keep": 9}
    this = job("adsp", 2, stop={"updates": 60}, checkpoint=never).model_dump(exclude_none=True) | {"paradigm": SEARCH}
    this = Job.from_table(this)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    if comm.rank == 0:
        part = read_part(checkpoint.newest(torn), checkpoint.RUN)
        assert part["coordinator"]["paradigm"]["wanted"] is not None
    whole = Coordinator.restore

    def restore(self: Coordinator, state: dict[str, Any]) -> None:
        whole(self, state | {"paradigm": state["paradigm"] | ({"points": []} if forgets else {})})

    monkeypatch.setattr(Coordinator, "restore", restore)
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert bool(failures(torn / "trace.h5")) == forgets
        rows = load(torn / "trace.h5").tables["decisions"]
        assert (rows["controller"] == b"commits").any()


@pytest.mark.once
def test_state_that_is_not_restored_is_found_in_the_trace(comm, only, folder, monkeypatch):
    only(3)
    this = job("ssp", comm.size - 1)
    on_some(comm, this, folder / "a")

    whole = Coordinator.restore

    def restore(self: Coordinator, state: dict[str, Any]) -> None:
        whole(self, state | {"samples": 0})

    monkeypatch.setattr(Coordinator, "restore", restore)
    torn = killed(comm, folder / "a")
    on_some(comm, this, torn, resume=True)
    if comm.rank == 0:
        assert failures(torn / "trace.h5")


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "dssp", "k-batch-async", "easgd"])
def test_a_run_resumes_with_fewer_workers_and_one_returns(comm, only, folder, paradigm):
    only(3)
    this = job(paradigm, comm.size - 1)
    on_some(comm, this, folder / "a")
    without = killed(comm, folder / "a")
    fewer = comm.Split(0 if comm.rank < comm.size - 1 else MPI.UNDEFINED)
    if fewer != MPI.COMM_NULL:
        resume_run(fewer, this, without)
        fewer.Free()
    comm.Barrier()
    newest = checkpoint.newest(without)
    assert checkpoint.number_of(newest) > 1
    if paradigm == "dssp":  # whose updates take a contribution at once, so that a missing worker's slot holds none
        part = read_part(newest, "server-0")
        assert comm.size - 2 not in part["kept"]
        assert len(part["slots"]) == len(part["kept"]) > 0
    back = killed(comm, without, n_checkpoints=2)
    on_some(comm, this, back, resume=True)
    if comm.rank == 0:
        absent, returned = load(without / "trace.h5"), load(back / "trace.h5")
        assert not failures(absent) and not failures(returned)
        changes = returned.tables["membership"][:2]
        assert changes["worker"].tolist() == [comm.size - 2] * 2
        assert changes["change"].tolist() == [Change.DIED, Change.JOINED]
        pushes = [(trace.tables["pushes"]["worker"] == comm.size - 2).sum() for trace in (absent, returned)]
        assert pushes[0] < pushes[1]


@pytest.mark.once
@pytest.mark.parametrize("version", [3, 4])
def test_a_run_resumes_from_a_checkpoint_of_an_older_format(comm, only, folder, version):
    """Each archive is a run of BSP, killed after five updates, by a release of that time.

    Its updates were computed by a processor that may round otherwise than this one.
    """
    only(3)
    if comm.rank == 0:
        with ZipFile(Path(__file__).with_name(f"checkpoint-format-{version}.zip")) as archive:
            archive.extractall(folder / "old")
    comm.Barrier()
    assert read_manifest(checkpoint.newest(folder / "old")).version == version
    this = Job.from_toml((folder / "old" / layout.JOB).read_text())
    resumed = on_some(comm, this, folder / "old", resume=True)
    weights = on_some(comm, this, folder / "new")
    if comm.rank == 0:
        np.testing.assert_allclose(resumed, weights, rtol=1e-12)
        assert not failures(folder / "old" / layout.TRACE)
    comm.Barrier()


@pytest.mark.once
def test_a_run_whose_checkpoints_are_always_due_makes_its_updates(comm, only, folder):
    only(3)
    on_some(comm, job("bsp", 2, checkpoint={"seconds": 1e-6, "keep": 2}), folder)
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        assert len(trace.tables["updates"]) == UPDATES and not failures(trace)
        assert checkpoint.number_of(checkpoint.newest(folder)) > UPDATES / 2
    comm.Barrier()


# ---- runs that cannot be resumed ----


@pytest.mark.once
def test_another_job_is_refused_in_one_line(comm, only, folder):
    only(3)
    this = job("bsp", comm.size - 1)
    on_some(comm, this, folder / "a")
    torn = killed(comm, folder / "a")
    other = job("bsp", comm.size - 1, optimizer=NESTEROV)
    with pytest.raises(hpcsync.config.errors.JobError, match=r"^optimizer\.lr = 0\.02: must be 0\.05, as it was when"):
        on_some(comm, other, torn, resume=True)
    with pytest.raises(hpcsync.config.errors.JobError, match="must hold a run that has not finished"):
        on_some(comm, this, folder / "a", resume=True)
    comm.Barrier()
    assert checkpoint.newest(torn) is not None
    longer = job("bsp", comm.size - 1, stop={"updates": UPDATES + 5})
    on_some(comm, longer, torn, resume=True)
    if comm.rank == 0:
        assert len(load(torn / "trace.h5").tables["updates"]) == UPDATES + 5
        assert Job.from_toml((torn / "job.toml").read_text()) == longer
        assert np.array_equal(load(torn / "trace.h5").tables["updates"]["version"], np.arange(1, UPDATES + 6))


def test_what_rank_0_refuses_of_a_run_that_resumes_leaves_its_files_as_they_are(comm, only, folder):
    only(2)
    network = {"name": "tests.mpi.network:regression", "batch_size": 4}
    on_some(comm, job("bsp", 1, workload=network), folder / "a")
    torn = killed(comm, folder / "a")
    before = {path: path.read_bytes() for path in torn.rglob("*") if path.is_file()}
    comm.Barrier()
    with pytest.raises(hpcsync.config.errors.JobError, match=r"^stop\.target_loss = 0\.1: workload\.name = .* must be"):
        on_some(comm, job("bsp", 1, workload=network, stop={"target_loss": 0.1}), torn, resume=True)
    assert {path: path.read_bytes() for path in before} == before
    comm.Barrier()
    if comm.rank == 0:
        lock.release(torn)
