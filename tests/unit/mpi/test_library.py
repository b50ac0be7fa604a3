"""A plain PyTorch script under `connect`, on any number of ranks; on one rank it trains alone."""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.api import user_errors
from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.mpi import session_base
from hpcsync.mpi.collectives import model_parts
from hpcsync.mpi.transport.node_memory import MemoryUnreachable
from hpcsync.mpi.transport.tensor_window import Transport
from hpcsync.mpi.transport.thread_ranks import run
from hpcsync.trace.reader import load


def problem() -> tuple[torch.nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 6, generator=generator)
    y = (x @ torch.arange(6.0)).unsqueeze(1)
    torch.manual_seed(5)
    return torch.nn.Linear(6, 1), TensorDataset(x, y)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_trains_with_its_own_loop_on_any_number_of_ranks(comm, folder, set_to_none):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcsync.connect(
        model, optimizer, "dssp", staleness_min=1, staleness_max=3, out=folder / "run", comm=comm
    ) as sync:
        for _ in range(8):
            for x, y in sync.shard(data, batch_size=16):
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
                sync.step(loss)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in comm.allgather(weights))
    assert torch.allclose(model.weight, torch.arange(6.0), atol=0.1)
    if comm.rank == 0 and comm.size > 1:
        assert all(found.passed for found in audit(folder / "run" / "trace.h5"))


def test_running_statistics_end_equal_everywhere(comm, folder):
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    _, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm) as sync:
        for x, y in sync.shard(data, batch_size=16):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)
    states = comm.allgather(model.state_dict())
    assert all(torch.equal(state[key], states[0][key]) for state in states for key in state)
    assert model[1].num_batches_tracked > 0


@pytest.mark.parametrize("servers", [1, 2])
def test_an_evaluation_that_falls_due_as_the_last_worker_leaves(comm, needs, folder, servers):
    """All servers must mean the same promise, also when one evaluation follows another at once."""
    needs(servers + 1)
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def evaluate(model: torch.nn.Module) -> tuple[float, float]:
        time.sleep(0.3)
        return 0.0, 0.0

    settings = {"servers": servers, "evaluate": evaluate, "every_samples": 16, "out": folder / "run", "comm": comm}
    with hpcsync.connect(model, optimizer, "asp", **settings) as sync:
        for x, y in sync.shard(data, batch_size=16):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)
        if sync.worker is not None:
            time.sleep(0.5)  # the first evaluation is over by now, and the next is due
    if comm.rank == 0:
        assert all(found.passed for found in audit(folder / "run" / "trace.h5"))


@pytest.mark.parametrize("piece", [1 << 30, 7])
def test_all_of_rank_0s_model_is_broadcast(comm, folder, piece, monkeypatch):
    """This includes frozen parameters and buffers of any type, in pieces where they are larger than MPI takes."""
    monkeypatch.setattr(model_parts, "BCAST_BYTES", piece)
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model.register_buffer("scale", torch.randn(3).bfloat16())
    model.register_buffer("count", torch.tensor(comm.rank))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.05)
    with hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm):
        mine = {key: value.clone() for key, value in model.state_dict().items()}
    everybody = comm.allgather(mine)
    assert all(torch.equal(state[key], everybody[0][key]) for state in everybody for key in mine)
    assert comm.rank or torch.equal(mine["count"], torch.tensor(0))


class Counted(torch.nn.Module):
    """Has a state that is no tensor, and a weight that is computed in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.prune.random_unstructured(torch.nn.Linear(6, 1), "weight", 0.5)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_pruned_model_with_a_state_of_its_own_is_evaluated_and_saved(comm, needs, folder, paradigm):
    needs(2)
    torch.manual_seed(1)
    model, data = Counted(), problem()[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    judged = []

    def evaluate(copy: torch.nn.Module) -> tuple[float, float]:
        judged.append(torch.nn.functional.mse_loss(copy(data.tensors[0]), data.tensors[1]).item())
        return judged[-1], 0.0

    settings = {"evaluate": evaluate, "every_samples": 16, "out": folder / "run", "comm": comm}
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:
        for x, y in sync.shard(data, batch_size=8):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if comm.rank == 0:
        assert evaluate(model)[0] == judged[-2] < judged[0]
        saved = load_file(folder / "run" / "weights.safetensors")
        assert torch.equal(saved["layer.weight_orig"], model.layer.weight_orig)


def test_differing_models_and_settings_are_refused_on_every_rank(comm, needs, folder):
    needs(2)
    model = torch.nn.Linear(6, 1 + (comm.rank == comm.size - 1))
    with pytest.raises(JobError, match=f"same parameters on every rank; rank {comm.size - 1}'s differ"):
        hpcsync.connect(model, torch.optim.SGD(model.parameters(), lr=0.1), "asp", out=folder / "run", comm=comm)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + (comm.rank == 1))
    with pytest.raises(JobError, match="same arguments on every rank; rank 1's differ from rank 0's"):
        hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm)


@pytest.fixture
def wrapped():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(6, 1))
    dist.destroy_process_group()


def test_a_model_in_a_distributed_data_parallel_is_refused(comm, needs, folder, wrapped):
    needs(2)
    with pytest.raises(JobError, match="^model: must not be in a DistributedDataParallel, which averages gradients"):
        hpcsync.connect(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), "asp", out=folder / "run", comm=comm)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("made", ["before", "within"])
def test_a_loop_that_calls_a_distributed_data_parallel_is_refused(comm, only, folder, wrapped, monkeypatch, made):
    """It would wait for ever for the server's part."""
    only(2)
    model = torch.nn.Linear(6, 1)
    before = DistributedDataParallel(model)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcsync.connect(model, sgd, "asp", out=folder / "run", comm=comm) as sync:
        for (x,) in sync.shard(TensorDataset(torch.ones(8, 6)), 2):
            with pytest.raises(JobError, match="^model: must not be in a DistributedDataParallel, which averages"):
                (before if made == "before" else DistributedDataParallel(model))(x)
            sgd.zero_grad()
            model(x).sum().backward()
            sync.step()
    assert before(torch.ones(6)).shape == (1,), "after the run it may be called"


def test_a_window_that_fails_at_the_models_size_is_refused_on_all_ranks(comm, needs, folder, monkeypatch):
    needs(2)

    def fail(*_):
        raise MemoryUnreachable("rank 0's memory: out of memory")

    monkeypatch.setattr(Transport, "window", fail)
    model = torch.nn.Linear(6, 1)
    with pytest.raises(
        JobError, match=r'cluster.window = "host": must be another here: rank 0.s memory: out of memory'
    ):
        hpcsync.connect(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce", out=folder / "run", comm=comm)


def test_a_session_is_refused_outside_of_its_block_and_a_step_without_a_batch(comm, folder):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm)
    with pytest.raises(RuntimeError, match="with statement"):
        session.shard(data, 16)
    with session as sync:
        with pytest.raises(JobError, match=r"the loop must run over sync.shard\(loader\)"):  # on a server too
            sync.step(0.0)


def test_a_session_within_another_is_refused_where_servers_serve(comm, needs, folder):
    """They would take part in it only after all workers have left the other one."""
    needs(2)
    _, data = problem()
    models = [problem()[0] for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]

    def connect(number):
        return hpcsync.connect(models[number], optimizers[number], "bsp", out=folder / str(number), comm=comm)

    def refused():
        for begin in (lambda: connect(2), others[1].__enter__):
            with pytest.raises(JobError, match="connect: must not be called within the with block of another session"):
                begin()

    others = [connect(0), connect(1)]
    for session, model, optimizer in zip(others, models, optimizers, strict=False):
        with session as sync:
            if session is others[0]:
                refused()
            for x, y in sync.shard(data, batch_size=16):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if session is others[0]:
                    refused()
    if comm.rank == 0:
        assert all(load(folder / str(number) / "trace.h5").status == "finished" for number in range(2))


@pytest.mark.parametrize("stop", [{}, {"samples": 100}])
@pytest.mark.parametrize("paradigm", ["bsp", "asp", "allreduce"])
def test_a_loop_may_draw_its_next_batch_before_each_step(comm, folder, paradigm, stop):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    n_steps = 0
    with hpcsync.connect(model, optimizer, paradigm, stop=stop, out=folder / "run", comm=comm) as sync:
        batches = iter(sync.shard(data, batch_size=8))
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            n_steps += sync.step(loss) or not stop
            batch = following
    n_steps = sum(comm.allgather(n_steps))
    assert n_steps < 32 if stop else n_steps == 32
    if comm.rank == 0 and comm.size > 1:
        assert [found for found in audit(folder / "run" / "trace.h5") if not found.passed] == []


def test_afterwards_model_and_optimizer_are_the_scripts_again(comm, folder):
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    user_errors.print_user_errors_in_one_line()  # until the process ends
    hook = sys.excepthook
    with hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm) as sync:
        pass
    assert sys.excepthook is hook
    with pytest.raises(RuntimeError, match="with statement"):
        sync.step()
    pickle.dumps(model)
    torch.nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_leaving_by_exit_without_a_status_is_an_end_like_any_other(comm, folder):
    model, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (
        pytest.raises(SystemExit),
        hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm),
    ):
        sys.exit()
    assert comm.size == 1 or comm.rank or audit(folder / "run" / "trace.h5")


@pytest.mark.parametrize("paradigm", ["asp", "allreduce", "ad-psgd"])
def test_an_evaluation_that_raises_ends_the_run(tmp_path, monkeypatch, capsys, paradigm):
    """The first one, which runs beside the training."""
    monkeypatch.setattr(session_base, "FAREWELL_S", 0.1)
    calls: list[torch.nn.Module] = []

    def evaluate(model: torch.nn.Module) -> tuple[float, float]:
        calls.append(model)
        if len(calls) == 1:
            raise ZeroDivisionError("of the script")
        return 0.0, 0.0

    def script(comm: Any) -> None:
        model, data = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        how = {"evaluate": evaluate, "every_samples": 32, "out": tmp_path / "run", "comm": comm}
        with hpcsync.connect(model, optimizer, paradigm, **how) as sync:
            for x, y in sync.shard(data, batch_size=4):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                sync.step()

    with pytest.raises(ZeroDivisionError, match="of the script"):
        run(3, script)
    assert "ZeroDivisionError: of the script" in capsys.readouterr().err
    assert load(tmp_path / "run" / "trace.h5").status == "failed"
