"""Scripts with parameters of 16 bits: the flat vectors hold copies of them, and every change of one is one of both."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.training import flat_model
from hpcsync.training.contributions import Position
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.local_update import Peer
from hpcsync.training.script_optimizers import ScriptOptimizers
from tests.unit.mpi.test_checkpoints import killed

DTYPES = [torch.float32, torch.bfloat16]
SETTINGS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "allreduce": {},
    "local-sgd": {"steps": 2},
    "easgd": {"period": 2},
}


@pytest.fixture(params=[False, True], ids=["", "never-spread"])
def forgets(request, monkeypatch) -> bool:
    """Whether parameters of another type are left as they are: the control."""
    if request.param:
        monkeypatch.setattr(flat_model.FlatModel, "spread", lambda self: None)
    return request.param


def one_weight(value: float, lr: float = 0.0) -> tuple[torch.nn.Module, FlatModel, ScriptOptimizers]:
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, value)
    flat = FlatModel(model, list(model.parameters()))
    return model, flat, ScriptOptimizers([torch.optim.SGD(model.parameters(), lr=lr)], flat)


def test_a_step_is_from_the_average(forgets):
    model, flat, script = one_weight(1.0)
    peer = Peer(flat.weights, script.on_worker(flat.weights))
    peer.adopt(torch.tensor([3.0]))
    model.weight.grad = torch.ones_like(model.weight)
    peer.step(flat.gradient, 1.0)
    assert (flat.weights.item(), model.weight.item()) == ((1.0, 1.0) if forgets else (3.0, 3.0))


def test_a_step_is_from_where_the_worker_has_moved_to(forgets):
    model, flat, script = one_weight(1.0)
    position = Position(
        flat.weights, script.on_worker(flat.weights), lambda samples, steps: 1.0, flat.gradient, alpha=0.5
    )
    model.weight.grad = torch.ones_like(model.weight)
    position.step(flat.gradient, 4, 1.0, last=True)
    position.prepare()
    position.adopt(torch.tensor([3.0]))
    assert (flat.weights.item(), model.weight.item()) == ((1.0, 1.0) if forgets else (2.0, 2.0))


@pytest.mark.parametrize("paradigm", ["bsp, 2 servers", "allreduce", "local-sgd"])
def test_all_ranks_begin_with_the_model_of_rank_0(comm, needs, folder, paradigm):
    name, servers = paradigm.partition(",")[0], 2 * ("servers" in paradigm)
    needs(servers + 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Linear(40, 1)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0 + comm.rank)
    options = {"servers": servers} if servers else {}
    if name == "local-sgd":
        options = {"steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    sgd = torch.optim.SGD(model.parameters(), lr=1e-30)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    with hpcsync.connect(model, sgd, name, comm=comm, out=folder / "run", **options) as sync:
        for (inputs,) in sync.shard(TensorDataset(x), batch_size=2):
            sgd.zero_grad()
            model(inputs.to(torch.bfloat16)).float().square().mean().backward()
            sgd.step()
    assert all((p == 1.0).all() for p in model.parameters())


def test_the_final_model_is_the_mean_of_the_replicas(comm, needs, folder):
    """Of replicas that have made one step each, and exchanged nothing."""
    needs(2)
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 8.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    own = TensorDataset(torch.full((1, 1), 2.0 * comm.rank, dtype=torch.bfloat16))
    with hpcsync.connect(model, sgd, "gossip", mode="pull", period=5, comm=comm, out=folder / "run") as sync:
        for (x,) in sync.shard(own, batch_size=1, sharded=True):
            sgd.zero_grad()
            model(x).sum().backward()
            sgd.step()
    assert model.weight.item() == 8.0 - (comm.size - 1)


def script(comm: MPI.Intracomm, out: Path, paradigm: str, dtype: torch.dtype, *, resume: bool = False) -> torch.Tensor:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
    data = TensorDataset(torch.randn(40, 3, dtype=dtype), torch.randn(40, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = SETTINGS[paradigm] | {"checkpoint": {"updates": 7, "keep": 9}}
    with hpcsync.connect(model, sgd, paradigm, comm=comm, out=out, resume=resume, **settings) as sync:
        for _ in range(4):
            for x, y in sync.shard(data, batch_size=4):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
                loss.backward()
                sgd.step()
                sgd.zero_grad()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.mark.once
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paradigm", SETTINGS)
def test_a_script_resumes_with_the_same_bits(comm, only, folder, paradigm, dtype):
    """Its loop clears gradients after its steps, so that one left from before would be added to the next."""
    only(2)
    finished = script(comm, folder / "a", paradigm, dtype)
    resumed = script(comm, killed(comm, folder / "a"), paradigm, dtype, resume=True)
    assert torch.equal(finished, resumed)


@pytest.mark.once
@pytest.mark.parametrize(
    ("paradigm", "dtype", "what", "forgotten", "broken"),
    [
        ("allreduce", torch.bfloat16, FlatModel, "spread", lambda self: None),
        ("easgd", torch.float32, ScriptOptimizers, "finishing", lambda self, state: nullcontext()),
        ("easgd", torch.float32, FlatModel, "drop_gradient", lambda self: None),
    ],
)
def test_what_is_not_restored_changes_the_bits(
    comm, only, folder, monkeypatch, paradigm, dtype, what, forgotten, broken
):
    only(2)
    finished = script(comm, folder / "a", paradigm, dtype)
    monkeypatch.setattr(what, forgotten, broken)
    resumed = script(comm, killed(comm, folder / "a"), paradigm, dtype, resume=True)
    assert not torch.equal(finished, resumed)
