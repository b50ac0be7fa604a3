"""Separated layers: the weights of one process, and the transfers between workers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hpcsync
from hpcsync.cli.rank_main import train
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.mpi.peer import activation_exchange
from hpcsync.mpi.peer.stanza import StanzaExchange
from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.tensor_window import MpiWindow
from hpcsync.planning.layer_groups import Groups
from hpcsync.simulator.simulate import prepare
from hpcsync.trace.reader import load
from hpcsync.training.local_update import Peer
from tests.mpi.training import Nothing, failures, one_process

ROOT = Path(__file__).resolve().parents[3]
NESTEROV = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01}
BELOW, ABOVE, CUT = 76, 323, 36  # numbers of the workload's layers, and of a sample between them
HERE = threading.local()  # the stand-in for a stream on which this thread is, if there is one


def job(workers: int, optimizer: Any = NESTEROV, updates: int = 5, pieces: int = 1, **tables: Any) -> Job:
    """With as many fully-connected workers as leave more than as many others: two of five."""
    return Job.from_table(
        {
            "name": "test",
            "seed": 3,
            "workload": {"name": "tests.mpi.network:convolutional", "batch_size": 4},
            "optimizer": optimizer,
            "stop": {"updates": updates},
            "evaluation": {"every_samples": 0},
            "paradigm": {
                "name": "stanza",
                "cut": "classifier",
                "fc_workers": max(1, (workers - 1) // 2),
                "fc_share": 0.3,
                "micro_batches": pieces,
            },
            "cluster": {"workers": workers, "compute": {"model": "constant", "seconds": 0.0005}},
            **tables,
        }
    )


def run(comm: Any, this: Job, folder: Any) -> tuple[Any, list[np.ndarray]]:
    """This rank's session, and what every rank has of the model in the end, as one vector."""
    session = train(comm, this, folder)
    weights = torch.cat([p.detach().flatten() for p in session._model.parameters()]).cpu().numpy()
    return session, comm.allgather(weights)


def simulated(this: Job) -> np.ndarray:
    workload = check(this)
    prepare(this, workload)(Nothing()).run()
    return torch.cat([p.detach().flatten() for p in workload.model.parameters()]).numpy()


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("optimizer", [NESTEROV, ADAM], ids=["nesterov", "adam"])
def test_the_weights_are_those_of_one_process_and_of_the_simulation(comm, needs, folder, optimizer, pieces):
    """They equal those of one process to rounding, and those of the simulation, on the CPU, to the bit.

    Batches of the fully-connected workers too are the control.
    """
    needs(2)
    this = job(comm.size, optimizer, pieces=pieces)
    session, weights = run(comm, this, folder)
    if comm.rank == 0:
        assert failures(folder / "trace.h5") == []
        n_convolution = this.groups.n_convolution
        assert np.allclose(weights[0], one_process(this, n_convolution), rtol=1e-10, atol=1e-14)
        assert not np.allclose(weights[0], one_process(this, n_convolution + 1), rtol=1e-6, atol=1e-9)
        assert session.flat.weights.is_cuda or np.array_equal(weights[0], simulated(this))


OPTIMIZED = """
import sys
from pathlib import Path
import numpy as np
from hpcsync.mpi.transport import thread_ranks
from hpcsync.system import garbage
from tests.unit.mpi.test_stanza import job, run, simulated

def rank(comm):
    _, weights = run(comm, job(2), Path(sys.argv[1]))
    if comm.rank == 0:
        print(np.array_equal(weights[0], simulated(job(2))))

garbage.freeze = lambda: None
thread_ranks.run(2, rank, limit_s=240.0)
"""


def test_a_python_without_assertions_gives_the_same_weights(tmp_path):
    """With PYTHONOPTIMIZE or -O, assertions are not computed at all."""
    argv = [sys.executable, "-O", "-c", OPTIMIZED, str(tmp_path)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "True"


@pytest.mark.parametrize("factor", ["own_mean", "weight"])
def test_a_wrong_factor_would_be_seen(comm, needs, folder, monkeypatch, factor):
    """Negative controls of the exactness.

    They omit the factor that makes a gradient that of its own batch, or that makes a group with more to compute count
    more.
    """
    needs(3 if factor == "own_mean" else 5)
    this = job(comm.size)
    monkeypatch.setattr(Groups, factor, lambda self, *_: 1.0)
    _, weights = run(comm, this, folder)
    if comm.rank == 0:
        assert not np.allclose(weights[0], one_process(this, this.groups.n_convolution), rtol=1e-6, atol=1e-9)


def test_whoever_trains_a_half_has_the_same_and_no_convolution_worker_the_upper_one(comm, needs, folder):
    needs(2)
    this = job(comm.size, ADAM)
    session, weights = run(comm, this, folder)
    start = torch.cat([p.detach().flatten() for p in check(this).model.parameters()]).numpy()
    for worker in this.groups.fc:
        assert np.array_equal(weights[worker], weights[0])
    for worker in this.groups.convolution:
        assert np.array_equal(weights[worker][:BELOW], weights[0][:BELOW])
        assert np.array_equal(weights[worker][BELOW:], start[BELOW:]), "as its own process has made it"
    assert session.flat.size == (ABOVE if comm.rank in this.groups.fc else BELOW)


def test_every_window_gives_the_same_bits(comm, needs, folder, through):
    needs(2)
    this = job(comm.size, pieces=2, updates=3)
    _, weights = run(comm, this, folder)
    if comm.rank == 0:
        assert failures(folder / "trace.h5") == []
        assert np.array_equal(weights[0], simulated(this))


def test_pieces_are_sent_on_a_stream_of_the_background_thread(comm, needs, folder, monkeypatch):
    """Stand-ins for streams: on a GPU, a send on the default stream would be queued behind the owner's computation."""
    needs(2)
    put, streams = MpiWindow.put, set()

    def after_this(call: Callable[[], None], device: torch.device, stream: str) -> Callable[[], None]:
        def made() -> None:
            HERE.stream = f"{stream} of {device}"
            call()
            HERE.stream = None

        return made

    def watched(self: MpiWindow, *transfer: Any) -> None:
        streams.add(getattr(HERE, "stream", None))
        put(self, *transfer)

    stand_in = SimpleNamespace(ready=cuda.ready, after_this=after_this, new_stream=lambda device: "own")
    monkeypatch.setattr(activation_exchange, "cuda", stand_in)
    monkeypatch.setattr(MpiWindow, "put", watched)
    run(comm, job(comm.size, pieces=2), folder)
    assert streams == {"own of cpu"}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_check_of_the_halves_leaves_all_generators_as_they_were(device, monkeypatch):
    forked = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forked.extend(devices) or nullcontext())
    flat = SimpleNamespace(weights=SimpleNamespace(device=torch.device(device)))
    exchange = SimpleNamespace(_layers=None, _flat=flat, _is_script=False)
    sample = (torch.zeros(1, 2),)
    assert StanzaExchange._sample(exchange, SimpleNamespace(first=lambda: sample)) is sample
    assert forked == [torch.device(device)] * (device != "cpu")


def test_all_end_after_the_same_iteration_whatever_ends_them(comm, needs, folder):
    """The run ends by time, or by a target that an evaluation finds, of which rank 0 learns first."""
    needs(2)
    for stop in ({"seconds": 1.0}, {"target_loss": 1.0}):
        this = job(comm.size, stop=stop, evaluation={"every_samples": 40})
        run(comm, this, folder / "-".join(stop))
        if comm.rank == 0:
            trace = load(folder / "-".join(stop) / "trace.h5")
            assert failures(folder / "-".join(stop) / "trace.h5") == []
            rows = trace.tables["exchanges"]
            last = {int(rows["iteration"][rows["worker"] == worker].max()) for worker in range(comm.size)}
            assert len(last) == 1 and last.pop() == len(trace.tables["updates"]) > 1
            assert len(trace.tables["evaluations"])


def test_evaluations_are_of_both_halves(comm, needs, folder):
    """Of the version that they name: one process finds the same loss."""
    needs(2)
    this = job(comm.size, updates=8, evaluation={"every_samples": 8 * comm.size})
    run(comm, this, folder)
    if comm.rank == 0:
        evaluations = load(folder / "trace.h5").tables["evaluations"]
        assert len(evaluations) >= 2
        workload = check(this)
        for evaluation in evaluations:
            some = job(comm.size, updates=int(evaluation["version"]))
            weights = torch.from_numpy(one_process(some, some.groups.n_convolution))
            torch.nn.utils.vector_to_parameters(weights, workload.model.parameters())
            assert workload.evaluate is not None
            assert workload.evaluate(workload.model)[0] == pytest.approx(evaluation["loss"], rel=1e-9)


@pytest.mark.once
@pytest.mark.parametrize("differs", [False, True])
def test_a_replica_that_differs_is_found_in_the_trace(comm, only, folder, monkeypatch, differs):
    """Of the last of three convolution workers, at its last step."""
    only(5)
    step, here = Peer.step, threading.current_thread()  # ranks are threads

    def stepping(self, gradient, lr):
        is_last = threading.current_thread() is here
        step(self, gradient * (1.0 + (differs and is_last)), lr)

    comm.Barrier()
    if comm.rank == 4:
        monkeypatch.setattr(Peer, "step", stepping)
    comm.Barrier()
    run(comm, job(comm.size, updates=1), folder)
    if comm.rank == 0:
        distance = load(folder / "trace.h5").tables["evaluations"]["consensus_distance"]
        assert (distance[-1] > 0) == differs
        found = {check.name for check in failures(folder / "trace.h5")}
        assert found == ({"all replicas have equal weights"} if differs else set())


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_script_trains_its_model_in_two_halves(comm, folder, as_loader):
    """Its loop is unaware of the separation; as a single process it is plain training."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(228, 2, 6, 6, generator=generator, dtype=torch.float64)
    y = x.sum((2, 3)).argmax(1)
    data = torch.utils.data.TensorDataset(x, y)
    torch.manual_seed(5)
    layout = torch.channels_last if as_loader else torch.contiguous_format
    model = check(job(2)).model.to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected, seen = _plainly(model, data, n_batches=max(1, comm.size - 1)), 0
    options = {"cut": "classifier", "stop": {"on_nan": "stop"}}  # losses that are known elsewhere do not count
    given = (torch.utils.data.DataLoader(data, 8, shuffle=True),) if as_loader else (data, 8)
    with hpcsync.connect(model, optimizer, "stanza", out=folder / "run", comm=comm, **options) as sync:
        for _ in range(2):
            for features, targets in sync.shard(*given):
                loss = torch.nn.functional.cross_entropy(model(features), targets)
                optimizer.zero_grad()
                loss.backward()
                assert torch.isnan(loss) == (comm.size > 1 and sync.worker != 0), "the loss is known elsewhere"
                sync.step(loss)
                seen += 1
        if comm.size > 1:
            with pytest.raises(RuntimeError, match="batches of the same shape"):
                next(sync.shard(data, batch_size=4))
            with torch.no_grad(), pytest.raises(RuntimeError, match="whole model|only some of them"):
                model(x[:2])
    assert seen == 2 * 28 // max(1, comm.size - 1)
    if comm.rank == 0:
        assert comm.size == 1 or failures(folder / "run" / "trace.h5") == []
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.allclose(weights, expected, rtol=1e-10, atol=1e-14)
        assert model(x[:2]).isfinite().all(), "all of it is here again"


def test_a_script_must_train_all_that_can_be_trained(comm, needs, folder):
    needs(2)
    model = check(job(2)).model
    some = torch.optim.SGD([*model.parameters()][:-1], lr=0.1)
    with pytest.raises(JobError, match="exactly the trainable parameters: 1 are in none, and 0 of its own are frozen"):
        hpcsync.connect(model, some, "stanza", out=folder / "run", comm=comm, cut="classifier")


@pytest.mark.parametrize("unscaled", [False, True])
def test_halves_cannot_have_scales_of_their_own(comm, needs, folder, unscaled):
    needs(2)
    model = check(job(2)).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(24, 2, 6, 6).double(), torch.zeros(24, dtype=torch.int64))
    scaler = torch.amp.GradScaler("cpu")
    with hpcsync.connect(model, optimizer, "stanza", out=folder / "run", comm=comm, cut="classifier") as sync:
        features, targets = next(sync.shard(data, 2))
        scaler.scale(torch.nn.functional.cross_entropy(model(features), targets)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        comm.Barrier()  # who leaves early sends nothing more
        with pytest.raises(JobError, match='^GradScaler: must be left out with paradigm.name = "stanza": after an'):
            scaler.step(optimizer)


def test_a_layer_may_be_frozen_during_the_run(comm, needs, folder):
    needs(2)
    torch.manual_seed(5)
    model = check(job(2)).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(24, 2, 6, 6, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, torch.zeros(24, dtype=torch.int64))
    with hpcsync.connect(model, optimizer, "stanza", out=folder / "run", comm=comm, cut="classifier") as sync:
        for features, targets in sync.shard(data, 2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
            next(model.parameters()).requires_grad_(False)
    assert all(p.isfinite().all() for p in model.parameters())


def _plainly(model: torch.nn.Module, data: Any, n_batches: int) -> torch.Tensor:
    """The script of one process, with so many batches at once; those of the last, smaller group are left out."""
    import copy

    from hpcsync.training.sampler import batch_indices

    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2 * 28 // n_batches):
        numbers = range(step * n_batches, (step + 1) * n_batches)
        rows = torch.from_numpy(np.concatenate([batch_indices(0, k, batch_size=8, size=228) for k in numbers]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
