"""A plain PyTorch script under `connect`, on any number of ranks; on one it trains by itself."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.traces.audit import audit


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


def test_what_the_servers_do_is_not_done_silently_by_the_script(comm, needs, folder):
    needs(2)
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm) as sync:
        for x, y in sync.shard(data, batch_size=16):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            with pytest.raises(RuntimeError, match="the servers run the optimizer"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01
            with pytest.raises(RuntimeError, match="learning rate from 0.05 to 0.01"):
                sync.step(loss)
            break
