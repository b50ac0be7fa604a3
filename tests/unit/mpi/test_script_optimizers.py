"""Scripts as they are, in float64: the same code trains with plain PyTorch on the batches of all workers together.

Synchronous paradigms must then give the same weights, whatever the script's optimizers, groups and schedules are.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.audit.trace_audit import audit
from hpcsync.config.errors import JobError
from hpcsync.core.step_problems import WRONG, ProblemReport
from hpcsync.paradigms.records import Problem, PushInfo
from hpcsync.trace.reader import load
from hpcsync.training import optimizer_groups, script_optimizers
from hpcsync.training.sampler import batches
from tests.counting import Counting

BATCH, STEPS = 4, 6
PARADIGMS = {"bsp": {}, "bsp, 2 servers": {"servers": 2}, "allreduce": {}}
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.norm, self.head = nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


def data(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x @ torch.arange(6.0, dtype=torch.float64)).sin().unsqueeze(1))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


# ---- scripts: each makes STEPS steps with its `batches`; `no_sync` is the session's, if any ----

Script = Callable[[nn.Module, Batches, Any], Any]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


def groups_and_schedule(model, optimizer, batches, sync):
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        cosine.step()


def one_cycle(model, optimizer, batches, sync):
    """Changes momenta, too."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS)
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()


def thawing(model, optimizer, batches, sync):
    """Two layers are frozen at first; weight decay and momentum must not move them."""
    for p in (*model.body.parameters(), *model.norm.parameters()):
        p.requires_grad_(False)
    for step, batch in enumerate(batches):
        if step == STEPS // 2:
            for p in model.norm.parameters():
                p.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def accumulating(model, optimizer, batches, sync):
    for number, batch in enumerate(batches):
        if number % 2 == 0:
            optimizer.zero_grad()
            with sync.no_sync() if sync and not sync.accumulates else torch.enable_grad():
                (loss_of(model, batch) / 2).backward()
        else:
            (loss_of(model, batch) / 2).backward()
            optimizer.step()


def drawing_ahead(model, optimizer, batches, sync):
    """As the Hugging Face Trainer: the batches of a step are drawn before its first backward pass."""
    for first in batches:
        second = next(batches)
        optimizer.zero_grad()
        for batch in (first, second):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()


def sometimes_unused(model, optimizer, batches, sync):
    """A layer takes part in every other step only; without a gradient momentum must not move it."""
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        hidden = model.body(x)
        hidden = model.norm(hidden) if step % 2 else hidden
        nn.functional.mse_loss(model.head(torch.tanh(hidden)), y).backward()
        optimizer.step()


def with_closure(model, optimizer, batches, sync):
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def checkpointed(model, optimizer, batches, sync):
    """Activations are computed again in the backward pass."""
    for x, y in batches:
        optimizer.zero_grad()
        below = nn.Sequential(model.body, model.norm, nn.Tanh())
        hidden = torch.utils.checkpoint.checkpoint(below, x, use_reentrant=False)
        nn.functional.mse_loss(model.head(hidden), y).backward()
        optimizer.step()


def with_gradients_of_its_own(model, optimizer, batches, sync):
    """Gradients come from torch.func, without a backward pass through the model's parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss_with(weights, batch):
        return nn.functional.mse_loss(torch.func.functional_call(model, weights, batch[0]), batch[1])

    for batch in batches:
        optimizer.zero_grad()
        weights = {name: p.detach() for name, p in zip(names, parameters, strict=True) if p.requires_grad}
        gradients = torch.func.grad(loss_with)(weights, batch)
        torch.autograd.backward([p for p in parameters if p.requires_grad], list(gradients.values()))
        optimizer.step()


def differentiating_between(model, optimizer, batches, sync):
    """One worker alone computes gradients after each step, as in an evaluation with attacked inputs."""
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        optimizer.step()
        if sync is None or sync.worker == 0:
            loss_of(model, (x.requires_grad_(), y)).backward()


def differentiating_between_two(model, optimizer, batches, sync):
    """The same, with two batches a step."""
    for number, batch in enumerate(batches):
        if number % 2 == 0:
            optimizer.zero_grad()
        (loss_of(model, batch) / 2).backward()
        if number % 2:
            optimizer.step()
            if sync is None or sync.worker == 0:
                loss_of(model, batch).backward()


def differentiating_the_gradient(model, optimizer, batches, sync):
    """The gradient's sum is a second loss; gradients are cleared in both ways."""
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with sync.no_sync() if sync else torch.enable_grad():
            loss_of(model, batch).backward(create_graph=True)
        sum(p.grad.sum() for p in model.parameters()).backward()
        optimizer.step()


def with_graph(model, optimizer, batches, sync):
    """As optimizers that estimate the Hessian need it."""
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, batch).backward(create_graph=True)
        optimizer.step()


def scaling_later(model, optimizer, batches, sync):
    """A scaler is used from step 2 on."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if step < 2:
            loss_of(model, batch).backward()
            optimizer.step()
        else:
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def loaded(model: nn.Module) -> torch.optim.Optimizer:
    """With the state of an earlier training."""
    twin = Net().double()
    before = torch.optim.Adam(twin.parameters(), lr=0.02)
    for batch in batches(data(8), 5, 0, n_workers=1, batch_size=4, epochs=range(1)):
        loss_of(twin, batch).backward()
        before.step()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    optimizer.load_state_dict(before.state_dict())
    return optimizer


class Own(torch.optim.Optimizer):
    """A script's own optimizer: not known to be element-wise."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-3), alpha=-group["lr"])


class Decaying(Own):
    """Changes its own rate, as optimizers do that learn it."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.7


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return Decaying(model.parameters(), lr=0.05)


def own(model: nn.Module) -> torch.optim.Optimizer:
    return Own(model.parameters(), lr=0.01)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(model.parameters(), lr=0.05, momentum=0.9)


CASES: dict[str, tuple[Callable, Callable, int]] = {  # script, optimizer, batches of a step
    "two groups, scheduled": (groups_and_schedule, two_groups, 1),
    "one cycle": (one_cycle, sgd, 1),
    "thawing": (thawing, sgd, 1),
    "accumulating": (accumulating, two_groups, 2),
    "sometimes unused": (sometimes_unused, sgd, 1),
    "closure, Nesterov": (with_closure, nesterov, 1),
    "loaded state": (with_closure, loaded, 1),
    "own class": (thawing, own, 1),
    "own numbers": (groups_and_schedule, counting, 1),
    "own rate": (sometimes_unused, decaying, 1),
    "activation checkpointing": (checkpointed, sgd, 1),
    "gradients of its own": (with_gradients_of_its_own, nesterov, 1),
    "gradients between steps": (differentiating_between, sgd, 1),
    "scaling later": (scaling_later, sgd, 1),
    "gradients with a graph": (with_graph, sgd, 1),
    "gradients of gradients": (differentiating_the_gradient, sgd, 1),
}


NO_MUON = not hasattr(torch.optim, "Muon")  # since torch 2.9
if not NO_MUON:
    CASES["whole matrices"] = (with_closure, muon, 1)


def plain(case: str, n_workers: int) -> torch.Tensor:
    script, make, per_step = CASES[case]
    model = Net().double()
    n = BATCH * n_workers * STEPS * per_step
    of_workers = [
        batches(data(n), 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1))
        for worker in range(n_workers)
    ]
    together = (tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*of_workers, strict=True))
    script(model, make(model), together, None)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(case: str, paradigm: str, comm: Any, folder: Any, accumulate: int = 1, **settings: Any) -> torch.Tensor:
    script, make, per_step = CASES[case]
    model, servers = Net().double(), settings.get("servers", 1 if paradigm == "bsp" else 0)
    n_workers = comm.size - servers if comm.size > 1 else 1
    optimizer = make(model)
    out = folder / "run"
    with hpcsync.connect(model, optimizer, paradigm, out=out, comm=comm, **settings) as sync:
        sync.accumulates = accumulate > 1
        samples = data(BATCH * n_workers * STEPS * per_step)
        script(model, optimizer, sync.shard(samples, BATCH, accumulate=accumulate), sync)
    if comm.rank == 0 and comm.size > 1:
        trace = load(out / "trace.h5")
        assert [found for found in audit(trace) if not found.passed] == []
        rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
        assert (rows["batch_size"] == BATCH * per_step).all() and len(rows) == STEPS * n_workers
        assert trace.tables["updates"]["samples"][-1] == BATCH * n_workers * STEPS * per_step
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_script_has_the_weights_of_plain_pytorch(comm, needs, folder, paradigm, case):
    name, _, _ = paradigm.partition(",")
    settings = PARADIGMS[paradigm]
    servers = settings.get("servers", 1 if name == "bsp" else 0)
    needs(servers + 1)
    found = trained(case, name, comm, folder, **settings)
    expected = plain(case, comm.size - servers if comm.size > 1 else 1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)


def as_lightning(model, optimizer, batches, sync, records):
    """As Lightning's Trainer: it draws ahead, and a step's last pass is in a closure, which returns half a loss."""
    losses, batches = [], iter(batches)
    batch, step = next(batches, None), 0
    while batch is not None:
        following = next(batches, None)

        def closure(batch=batch):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            if records:
                sync.record(loss)
            (loss / 2).backward()
            return (loss / 2).detach() if records else None

        if step % 2 == 0:
            closure()
        else:
            optimizer.step(closure)
            optimizer.zero_grad()
        batch, step = following, step + 1
    return losses


@pytest.mark.parametrize("records", [True, False])
def test_what_a_closure_records_or_does_not_return_is_not_recorded_otherwise(comm, needs, folder, records):
    needs(2)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hpcsync.connect(model, optimizer, out=folder / "run", comm=comm) as sync:
        loader = sync.shard(data(BATCH * 4 * (comm.size - 1)), BATCH, accumulate=2)
        losses = as_lightning(model, optimizer, loader, sync, records)
    own = [losses for losses in comm.allgather(losses) if losses]
    if comm.rank == 0:
        rows = load(folder / "run" / "trace.h5").tables["pushes"]
        for worker, mine in enumerate(own):
            means = np.mean([mine[::2], mine[1::2]], axis=0) if records else [math.nan] * 2
            np.testing.assert_allclose(rows["loss"][rows["worker"] == worker], means)


class MovingAverage(nn.Module):
    """A layer of which it keeps a moving average, without an optimizer, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.average = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for average, p in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return self.layer(x) + 0.5 * self.average(x)


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_what_a_model_itself_keeps_is_a_workers_at_the_end(comm, needs, folder, monkeypatch, paradigm):
    name, settings = paradigm.partition(",")[0], PARADIGMS[paradigm]
    servers = settings.get("servers", 1 if name == "bsp" else 0)
    needs(servers + 1)
    monkeypatch.setattr(sys.modules[__name__], "Net", MovingAverage)
    monkeypatch.setitem(CASES, "average", (with_closure, lambda model: sgd(model.layer), 1))
    found = trained("average", name, comm, folder, **settings)
    expected = plain("average", comm.size - servers if comm.size > 1 else 1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("case", ["accumulating", "drawing ahead", "gradients between steps"])
def test_the_session_is_told_how_many_backward_passes_accumulate(comm, needs, folder, monkeypatch, paradigm, case):
    needs(2)
    monkeypatch.setitem(CASES, "drawing ahead", (drawing_ahead, two_groups, 2))
    monkeypatch.setitem(CASES, "gradients between steps", (differentiating_between_two, sgd, 2))
    found = trained(case, paradigm, comm, folder, accumulate=2)
    expected = plain(case, comm.size - (paradigm == "bsp"))
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)


def prefetching(model, optimizer, batches, sync):
    """The next batch is drawn between backward pass and step."""
    batch = next(batches, None)
    while batch is not None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        batch = next(batches, None)
        optimizer.step()


def prefetching_and_differentiating(model, optimizer, batches, sync):
    """The next batch is drawn before the backward pass; one worker alone computes gradients after each step."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if sync is None or sync.worker == 0:
            loss_of(model, batch).backward()
        batch = following


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("script", [prefetching, prefetching_and_differentiating])
def test_the_next_batch_may_be_drawn_before_the_step(comm, needs, folder, monkeypatch, script, paradigm):
    needs(2)
    monkeypatch.setitem(CASES, "prefetching", (script, sgd, 1))
    model, n_workers = Net().double(), comm.size - (paradigm == "bsp")
    optimizer = sgd(model)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        script(model, optimizer, sync.shard(data(BATCH * n_workers * STEPS), BATCH), sync)
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(found, plain("prefetching", n_workers), rtol=0, atol=1e-10)
    if comm.rank == 0:
        assert [check for check in audit(load(folder / "run" / "trace.h5")) if not check.passed] == []


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("script", [prefetching, prefetching_and_differentiating])
def test_a_run_may_end_while_the_next_batch_has_been_drawn(comm, needs, folder, script, paradigm):
    needs(2)
    model, n_workers = Net().double(), comm.size - (paradigm == "bsp")
    optimizer = sgd(model)
    settings = {"stop": {"updates": STEPS // 2}, "out": folder / "run", "comm": comm}
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:
        script(model, optimizer, sync.shard(data(BATCH * n_workers * STEPS), BATCH), sync)
    if comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        assert len(trace.tables["updates"]) == STEPS // 2
        assert [check for check in audit(trace) if not check.passed] == []


@pytest.mark.parametrize("broken", ["numbers", "presence"])
def test_a_server_that_ignores_what_workers_state_is_noticed(comm, needs, folder, monkeypatch, broken):
    needs(2)
    case = "two groups, scheduled" if broken == "numbers" else "thawing"
    if broken == "numbers":
        monkeypatch.setattr(optimizer_groups.Groups, "set_numbers", lambda *_: None)
    else:
        monkeypatch.setattr(script_optimizers.ScriptOptimizers, "present", [True] * 6)
    found = trained(case, "bsp", comm, folder)
    assert not torch.allclose(found, plain(case, comm.size - 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["two groups, scheduled", "thawing", "closure, Nesterov"])
def test_the_number_of_servers_changes_no_bit(comm, needs, folder, case):
    needs(5)
    weights = []
    for servers in (1, 2):
        part = comm.Split(int(comm.rank < servers + 2))
        if comm.rank < servers + 2:
            weights.append(trained(case, "bsp", part, folder / str(servers), servers=servers))
    assert comm.rank >= 3 or torch.equal(*weights)


@pytest.mark.parametrize("make", [two_groups, counting, decaying])
@pytest.mark.parametrize("servers", [0, 1, 2])
def test_after_the_run_the_optimizer_has_its_state(comm, needs, folder, servers, make, capsys):
    """Whatever ran it: a script saves it, and trains on from it."""
    needs(servers + 1)
    model, n_workers = Net().double(), comm.size - servers
    optimizer = make(model)
    samples = data(BATCH * n_workers * STEPS)
    paradigm = "bsp" if servers else "allreduce"
    with hpcsync.connect(model, optimizer, paradigm, servers=servers, out=folder / "run", comm=comm) as sync:
        for step, batch in enumerate(sync.shard(samples, BATCH)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if servers and step == 1:
                optimizer.state_dict()
                with pytest.raises(RuntimeError, match="load it before connect"):
                    optimizer.load_state_dict({})
    if comm.rank == 0:
        is_told = "each of 2 servers steps its own parameters" in capsys.readouterr().out
        assert is_told == (make is not two_groups and servers == 2)
    twin = Net().double()
    theirs = make(twin)
    of_workers = [
        batches(samples, 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1))
        for worker in range(n_workers)
    ]
    for each in zip(*of_workers, strict=True):
        theirs.zero_grad()
        loss_of(twin, tuple(map(torch.cat, zip(*each, strict=True)))).backward()
        theirs.step()
    mine, expected = optimizer.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    assert mine["state"].keys() == expected["state"].keys()
    assert len(mine["state"]) == {two_groups: 6, counting: 7, decaying: 0}[make]
    assert mine["state"].pop("steps", None) == expected["state"].pop("steps", None)
    for index, kept in expected["state"].items():
        assert mine["state"][index].keys() == kept.keys()
        for key, value in kept.items():
            assert torch.allclose(mine["state"][index][key], value, rtol=0, atol=1e-10), key


@pytest.mark.parametrize("make", [two_groups, counting, decaying])
@pytest.mark.parametrize("paradigm", ["easgd", "async-diloco"])
def test_servers_have_the_optimizer_of_a_worker_where_workers_step(comm, needs, folder, paradigm, make):
    """Rank 0, which is a server, saves it."""
    needs(2)
    model = Net().double()
    optimizer = make(model)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for batch in sync.shard(data(BATCH * (comm.size - 1) * STEPS), BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
    numbers = [{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups]
    saved = comm.allgather((optimizer.state_dict()["state"], numbers))
    assert script_optimizers.same(saved[0][0], saved[-1][0]) and saved[0][1] == saved[-1][1]
    assert make is decaying or saved[0][0]
    assert saved[0][1][0]["lr"] < make(Net()).param_groups[0]["lr"] * 0.9


def test_more_servers_than_pieces_are_refused(comm, needs, folder):
    needs(5)
    model = nn.Linear(6, 1)
    with pytest.raises(JobError, match="cluster.servers = 3: must be at most 2"):
        hpcsync.connect(model, sgd(model), "bsp", servers=3, out=folder / "run", comm=comm)
    model = nn.Linear(100, 2)
    with pytest.raises(JobError, match="servers = 3: must be at most 2 for Own, which needs whole"):
        hpcsync.connect(model, own(model), "bsp", servers=3, out=folder / "run", comm=comm)


def test_sparse_gradients(comm, needs, folder):
    needs(2)
    torch.manual_seed(1)
    model = nn.EmbeddingBag(12, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = TensorDataset(torch.arange(24).view(-1, 1) % 12)
    before = model.weight.detach().clone()
    with hpcsync.connect(model, optimizer, "asp", out=folder / "run", comm=comm) as sync:
        for (x,) in sync.shard(numbers, 2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert torch.allclose(model.weight, before - 0.2)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "easgd", "local-sgd"])
def test_rates_and_losses_are_recorded(comm, needs, folder, paradigm):
    needs(2)
    options = {"easgd": {"period": 1}, "local-sgd": {"steps": 1}}.get(paradigm, {})
    model = Net().double()
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm, **options) as sync:
        for batch in sync.shard(data(BATCH * STEPS * comm.size), BATCH):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            sync.record(loss)
            seen.append((*(group["lr"] for group in optimizer.param_groups), loss.item()))
            optimizer.step()
            schedule.step()
    together = [each for each in comm.allgather(seen) if each]
    if comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
        for worker, expected in enumerate(together):
            own_rows = rows[rows["worker"] == worker]
            np.testing.assert_allclose(own_rows["lr"], [lr for lr, _, _ in expected])
            np.testing.assert_allclose(own_rows["loss"], [loss for _, _, loss in expected])
            for group in range(2):
                changes = trace.tables["rates"]
                changes = changes[(changes["worker"] == worker) & (changes["group"] == group)]
                assert list(changes["iteration"]) == list(range(1, len(expected) + 1, 2))  # of StepLR
                np.testing.assert_allclose(changes["lr"], [each[group] for each in expected[::2]])
        if paradigm in ("bsp", "allreduce"):
            rates = trace.tables["updates"]["lr"][:STEPS]
            np.testing.assert_allclose(rates, [lr for lr, _, _ in together[0]][: len(rates)])


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "asp"])
@pytest.mark.parametrize("own", [False, True])
def test_rates_that_follow_each_worker_s_own_loss_are_said_to_differ(comm, only, folder, paradigm, own, capsys):
    only(3)
    model = Net().double()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        for batch in sync.shard(data(BATCH * sync.n_workers * 4), BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            own_loss = -float(schedule.last_epoch) if sync.worker else 1.0  # worker 0's does not fall
            schedule.step(own_loss if own else 1.0)
    if comm.rank == 0:
        assert ("the workers' learning rates differ in step 4" in capsys.readouterr().err) == own


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_steps_in_its_own_type(comm, needs, folder, paradigm, dtype):
    needs(2)
    alone = paradigm == "bsp" and comm.size > 2  # with one worker the gradient is not a mean
    part = comm.Split(int(comm.rank < 2)) if alone or comm.size > 1 else comm
    if comm.rank >= 2:
        return
    model, twin = Net().to(dtype), Net().to(dtype)
    model.head, twin.head = model.head.float(), twin.head.float()  # several types
    model.forward = lambda x: model.head(torch.tanh(model.norm(model.body(x.to(dtype)))).float())
    twin.forward = lambda x: twin.head(torch.tanh(twin.norm(twin.body(x.to(dtype)))).float())
    for each in (model, twin):
        each.optimizer = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
    samples = TensorDataset(*(tensor.float() for tensor in data(BATCH * STEPS).tensors))
    n_workers = 1 if paradigm == "bsp" else 2
    with hpcsync.connect(model, model.optimizer, paradigm, out=folder / "run", comm=part) as sync:
        with_closure(model, model.optimizer, sync.shard(samples, BATCH), sync)
    assert {p.dtype for p in model.parameters()} == {dtype, torch.float32}
    if n_workers == 1:
        own_batches = batches(samples, 0, 0, n_workers=1, batch_size=BATCH, epochs=range(1))
        with_closure(twin, twin.optimizer, own_batches, None)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    else:
        mine = [p.detach().clone() for p in model.parameters()]
        assert all(torch.equal(p, q) for other in part.allgather(mine) for p, q in zip(mine, other, strict=True))


@pytest.mark.parametrize("paradigm", [*PARADIGMS, "local-sgd"])
def test_a_batch_with_which_an_epoch_is_left_is_no_part_of_the_next_step(comm, needs, folder, paradigm):
    needs(2)
    model, name = Net().double(), paradigm.partition(",")[0]
    optimizer, options = sgd(model), {**PARADIGMS.get(paradigm, {}), **({"steps": 2} if name == "local-sgd" else {})}
    n_workers = comm.size - options.get("servers", int(name == "bsp"))
    if n_workers < 1:
        pytest.skip("no worker")
    samples = TensorDataset(*(tensor.double() for tensor in data(BATCH * n_workers * 4).tensors))
    with hpcsync.connect(model, optimizer, name, out=folder / "run", comm=comm, **options) as sync:
        for _ in range(2):
            for i, batch in enumerate(sync.shard(samples, BATCH)):
                if i == 2:
                    break
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    if comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        rows = trace.tables["pushes" if name == "bsp" else "exchanges"]
        assert rows["batch_size"][rows["batch_size"] > 0].tolist() == [BATCH] * 4 * n_workers
        assert [check.name for check in audit(trace) if not check.passed] == []


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_two_optimizers_refuse_compression(comm, needs, folder, paradigm):
    needs(2)
    models = [Net().double(), Net().double()]
    with pytest.raises(JobError, match='compression.name = "top-k": must be left out with several optimizers'):
        compression = {"name": "top-k", "ratio": 0.1}
        hpcsync.connect(
            models, list(map(sgd, models)), paradigm, compression=compression, out=folder / "run", comm=comm
        )


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_dgc_refuses_momentum_of_any_group(comm, needs, folder, paradigm):
    needs(2)
    model = Net().double()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], lr=0.05)
    with pytest.raises(JobError, match='optimizer.momentum = 0.9: must be 0 or omitted with compression.name = "dgc"'):
        compression = {"name": "dgc", "ratio": 0.1}
        hpcsync.connect(model, optimizer, paradigm, compression=compression, out=folder / "run", comm=comm)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_dgc_refuses_momentum_that_a_scheduler_sets(comm, only, folder, paradigm):
    only(2)
    model = Net().double()
    optimizer, compression = torch.optim.SGD(model.parameters(), lr=0.05), {"name": "dgc", "ratio": 0.1}
    with hpcsync.connect(model, optimizer, paradigm, compression=compression, out=folder / "run", comm=comm) as sync:
        for step, batch in enumerate(sync.shard(data(8 * BATCH), BATCH)):
            loss_of(model, batch).backward()
            if step == 1:
                torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
                with pytest.raises(JobError, match=r"optimizer.momentum = 0.95: must be 0 or omitted with compression"):
                    optimizer.step()
                optimizer.param_groups[0]["momentum"] = 0.0
            optimizer.step()


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_two_optimizers_refuse_allocated_batches(comm, needs, folder, paradigm):
    """Each step would be allocated samples, of which the loop draws only those of every second one."""
    needs(2)
    models, batches = [Net().double(), Net().double()], {"policy": "equal-finish", "total": 8 * BATCH}
    with pytest.raises(JobError, match='batches.policy = "equal-finish": must be "equal" with several optimizers'):
        hpcsync.connect(models, list(map(sgd, models)), paradigm, batches=batches, out=folder / "run", comm=comm)
    models[0].optimizer = sgd(models[0])  # the control: one of them
    with hpcsync.connect(models[0], models[0].optimizer, paradigm, batches=batches, out=folder / "run", comm=comm):
        pass


@pytest.mark.skipif(NO_MUON, reason="torch has no Muon")
@pytest.mark.parametrize("paradigm", ["bsp", "bsp, 2 servers", "allreduce", "local-sgd"])
def test_muon_steps_on_whole_matrices(comm, needs, folder, paradigm):
    """Only it can step on them: it refuses anything else."""
    name, settings = paradigm.partition(",")[0], PARADIGMS.get(paradigm, {})
    n_servers = settings.get("servers", 1) if name == "bsp" else 0
    needs(n_servers + 1)

    def make() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False)).double()

    model, twin, n_workers = make(), make(), comm.size - n_servers
    samples = data(BATCH * n_workers * STEPS)
    options = {"steps": 1} if name == "local-sgd" else {}
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    with hpcsync.connect(model, optimizer, name, out=folder / "run", comm=comm, **settings, **options) as sync:
        with_closure(model, optimizer, sync.shard(samples, BATCH), sync)
    theirs = torch.optim.Muon(twin.parameters(), lr=0.02)
    of_workers = [
        batches(samples, 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1))
        for worker in range(n_workers)
    ]
    together = (tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*of_workers, strict=True))
    with_closure(twin, theirs, together, None)
    equal = [
        torch.allclose(p, q, rtol=0, atol=1e-10) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    assert all(equal) or (name == "local-sgd" and n_workers > 1)  # the mean of steps, not the step of the mean


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_two_models_with_two_optimizers(comm, needs, folder, paradigm):
    """A generator and a discriminator: each step changes one of them."""
    needs(2)

    def make():
        torch.manual_seed(4)
        models = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double(), Net().double()
        return models, [torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.9)) for each in models]

    def script(models, optimizers, batches):
        (generator, judge), (of_generator, of_judge) = models, optimizers
        for x, _ in batches:
            of_judge.zero_grad()
            (judge(generator(x).detach()).mean() - judge(x).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            judge(generator(x)).square().mean().backward()
            of_generator.step()

    n_workers = comm.size - (paradigm == "bsp")
    samples = data(BATCH * n_workers * STEPS)
    models, optimizers = make()
    with hpcsync.connect(models, optimizers, paradigm, out=folder / "run", comm=comm) as sync:
        if sync.worker is not None:
            with pytest.raises(RuntimeError, match="several optimizers; call the step of each"):
                sync.step()
        script(models, optimizers, sync.shard(samples, BATCH))
    of_workers = [
        batches(samples, 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1))
        for worker in range(n_workers)
    ]
    twins, theirs = make()
    script(twins, theirs, (tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*of_workers, strict=True)))
    for mine, twin in zip(models, twins, strict=True):
        for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-10)
    if comm.rank == 0:
        assert len(load(folder / "run" / "trace.h5").tables["updates"]) == 2 * STEPS


@pytest.mark.parametrize("servers", [1, 2])
def test_each_of_two_optimizers_has_what_its_servers_have_kept_in_its_groups(comm, needs, folder, servers):
    """Of two servers each has the parameters of one optimizer."""
    needs(servers + 1)
    models = nn.Linear(6, 1), nn.Linear(6, 1)
    optimizers = [*map(counting, models)]
    samples = data(BATCH * (comm.size - servers) * STEPS)
    with hpcsync.connect(models, optimizers, "bsp", servers=servers, out=folder / "run", comm=comm) as sync:
        for x, _ in sync.shard(samples, BATCH):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x.float()).square().mean().backward()
                optimizer.step()
    for optimizer in optimizers:
        (group,) = optimizer.param_groups
        assert (group["k"], group["weight_decay"], optimizer.state["steps"]) == (STEPS, 0.5 / STEPS, STEPS)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_step_that_a_scaler_skips_changes_nothing_and_is_recorded(comm, needs, folder, paradigm):
    needs(2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    samples = TensorDataset(*(tensor.float() for tensor in data(BATCH * STEPS * comm.size).tensors))
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        for step, batch in enumerate(sync.shard(samples, BATCH)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * (float("inf") if step == 2 else 1.0)).backward()
            before = model.head.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.head.weight) == (step == 2)
    if comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
        assert set(rows["iteration"][rows["problem"] > 0]) == {3}
        assert [found for found in audit(trace) if not found.passed] == []


COMMITS = {
    "ashl": {"warmup": 1, "profiled": 4, "steps_coarse": 3, "steps_fine": 2, "loss_preset": 1.5},
    "async-diloco": {"steps": 2, "grace_s": 0.002},
}


@pytest.mark.once
@pytest.mark.parametrize(("paradigm", "skipped"), [("ashl", [2]), ("async-diloco", [2]), ("async-diloco", [2, 3])])
def test_a_commit_of_skipped_steps_does_not_count(comm, only, folder, paradigm, skipped):
    """One of which some steps are skipped does."""
    only(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    samples = TensorDataset(*(tensor.float() for tensor in data(BATCH * STEPS * comm.size).tensors))
    with hpcsync.connect(model, optimizer, paradigm, out=folder, comm=comm, **COMMITS[paradigm]) as sync:
        for step, batch in enumerate(sync.shard(samples, BATCH)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch) * (float("inf") if step in skipped else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    if comm.rank == 0:
        trace = load(folder / "trace.h5")
        pushes = trace.tables["pushes"]
        for worker in range(2):
            own = pushes[pushes["worker"] == worker]
            ends = np.cumsum(own["local_steps"]).tolist()
            lost = [set(range(begin, end)) <= set(skipped) for begin, end in zip([0, *ends], ends, strict=False)]
            assert (own["problem"] > 0).tolist() == lost
            assert (own["weight"][lost] == 0).all() and (own["weight"][~np.array(lost)] > 0).any()
        assert [found for found in audit(trace) if not found.passed] == []


@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("paradigm", ["bsp", "asp", "easgd", "allreduce"])
def test_hooks_of_the_step_are_called(comm, needs, folder, paradigm, by_session):
    """Once in each step of a worker, wherever its optimizer runs."""
    needs(2)
    model, called = Net().double(), []
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        for batch in sync.shard(data(BATCH * sync.n_workers * STEPS), BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            sync.step() if by_session else optimizer.step()
    assert called == (["before", "after"] * STEPS if sync.worker is not None else [])


@pytest.mark.parametrize("servers", [1, 2])
def test_the_servers_clip_the_mean(comm, needs, folder, servers):
    needs(servers + 1)
    model, twin, n_workers = Net().double(), Net().double(), comm.size - servers
    samples, optimizer = data(BATCH * n_workers * STEPS), sgd(model)
    with hpcsync.connect(
        model, optimizer, "bsp", servers=servers, clip_norm=0.1, out=folder / "run", comm=comm
    ) as sync:
        with_closure(model, optimizer, sync.shard(samples, BATCH), sync)
    theirs = sgd(twin)
    of_workers = [
        batches(samples, 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1))
        for worker in range(n_workers)
    ]
    for each in zip(*of_workers, strict=True):
        theirs.zero_grad()
        loss_of(twin, tuple(map(torch.cat, zip(*each, strict=True)))).backward()
        assert torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1) > 0.1
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-10)


# ---- what is said ----


def mistaken(mistake: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, sync: Any) -> None:
    for step, batch in enumerate(batches):
        if step == 1 and mistake == "double":
            model.float()
        if step == 1 and mistake == "layer":
            model.head = nn.Linear(40, 1, dtype=torch.float64)
        if step == 1 and mistake == "group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
        if step == 3 and mistake == "assigned":  # not a step in which all modules are looked at
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        if mistake == "layer" and step == 0:
            model.extra = nn.Linear(1, 1, dtype=torch.float64)
        x, y = batch
        loss = loss_of(model, (x.to(model.body.weight.dtype), y))
        if mistake in ("nan", "nan, not recorded"):
            loss = loss * float("nan")
        optimizer.zero_grad(set_to_none=mistake != "backward")
        if mistake != "backward" or step == 0:
            loss.backward()
        optimizer.step() if mistake == "nan, not recorded" else sync.step(loss)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "asp"])
@pytest.mark.parametrize("early", [False, True])
def test_a_worker_that_makes_fewer_steps_is_named(comm, needs, folder, capsys, paradigm, early):
    needs(3)
    model = Net().double()
    optimizer = sgd(model)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        for step, batch in enumerate(sync.shard(data(BATCH * STEPS * sync.n_workers), BATCH)):
            if early and sync.worker == 1 and step == 2:
                break
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    comm.Barrier()
    if comm.rank == 0:
        said = [line for line in capsys.readouterr().err.splitlines() if "steps" in line]
        without = "the updates from step 3 on are without 1"
        if early and paradigm != "asp":
            assert said == [f"hpcsync: worker 1 made 2 steps, others up to {STEPS}: {without}"]
        else:
            assert said == []


def test_fewer_steps_than_a_push_takes_are_said(comm, needs, folder, capsys):
    needs(2)
    model = Net().double()
    optimizer = sgd(model)
    with hpcsync.connect(model, optimizer, "easgd", period=STEPS + 1, out=folder / "run", comm=comm) as sync:
        with_closure(model, optimizer, sync.shard(data(BATCH * STEPS * sync.n_workers), BATCH), sync)
    comm.Barrier()
    if comm.rank == 0:
        assert f"(a push follows every {STEPS + 1} steps)" in capsys.readouterr().err


MISTAKES = {
    "backward": "worker 0, iteration 2.*: step without a gradient",
    "double": "the model or the optimizer has changed since connect",
    "layer": "the model or the optimizer has changed since connect",
    "group": "the model or the optimizer has changed since connect",
    "assigned": "iteration 4.*the model or the optimizer has changed since connect",
    "nan": "iteration 1.*: the loss is not finite",
    "nan, not recorded": "iteration 1.*: the gradient is not finite",
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - {"double"}))  # alone a model may be cast
def test_alone_a_mistake_is_one_line(mistake):
    model = Net().double()
    optimizer = sgd(model)
    with (
        pytest.raises(JobError, match=MISTAKES[mistake]) as caught,
        hpcsync.connect(model, optimizer, stop={"on_nan": "stop"}) as sync,
    ):
        mistaken(mistake, model, optimizer, sync.shard(data(40), BATCH), sync)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "gossip"])
@pytest.mark.parametrize("mistake", ["backward", "nan", "nan, not recorded"])
def test_a_mistake_is_recorded(comm, needs, folder, monkeypatch, paradigm, mistake):
    needs(2)
    monkeypatch.setattr(ProblemReport, "see", lambda self, info: None)  # the ranks go on
    model = Net().double()
    optimizer, options = sgd(model), {"mode": "pull"} if paradigm == "gossip" else {}
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm, **options) as sync:
        mistaken(mistake, model, optimizer, sync.shard(data(BATCH * 3 * comm.size), BATCH), sync)
    if comm.rank == 0:
        trace = load(folder / "run" / "trace.h5")
        rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
        expected = {
            "backward": Problem.NO_GRADIENT,
            "nan": Problem.LOSS_NOT_FINITE,
            "nan, not recorded": Problem.GRADIENT_NOT_FINITE,
        }[mistake]
        assert {int(each) for each in rows["problem"][rows["iteration"] == 2]} == {expected}


@pytest.mark.parametrize("problem", [each for each in Problem if each > Problem.SKIPPED])
def test_a_problem_is_said_once_or_ends_the_run(problem, capsys):
    push = PushInfo(1.0, 3, 7, 5, problem=problem)
    with pytest.raises(JobError, match="worker 3, iteration 7, version 5: "):
        ProblemReport("stop").see(push)
    report = ProblemReport("warn")
    if problem in WRONG:
        with pytest.raises(JobError, match="worker 3, iteration 7, version 5: "):
            report.see(push)
    else:
        report.see(push)
        report.see(push)
        assert capsys.readouterr().err.count("worker 3, iteration 7") == 1
    report.see(push._replace(problem=Problem.SKIPPED))
    assert capsys.readouterr().err == ""


class Wrapper(torch.optim.Optimizer):
    """As Lightning Fabric and Accelerate wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


class Lookahead(torch.optim.Optimizer):
    """Its step is more than that of the optimizer within."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.defaults, self.param_groups, self.state = optimizer.defaults, optimizer.param_groups, optimizer.state


Wrapper.__module__ = "accelerate.optimizer"


def lookahead(model: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(sgd(model))


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_wrapper_of_accelerate_is_the_optimizer_within(comm, needs, folder, monkeypatch, paradigm):
    needs(2)
    monkeypatch.setitem(CASES, "wrapped", (with_closure, lambda model: Wrapper(sgd(model)), 1))
    found = trained("wrapped", paradigm, comm, folder)
    assert torch.allclose(found, plain("wrapped", comm.size - (paradigm == "bsp")), rtol=0, atol=1e-10)


class Warmup(torch.optim.Optimizer):
    """Sets the rates and steps with the optimizer that a script gives to `connect`."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize("paradigm", ["bsp", "allreduce", "local-sgd", "easgd"])
def test_a_step_of_another_optimizer_is_refused(comm, needs, folder, paradigm):
    """Such as one created for the second half of the training; one that only calls the script's may step.

    So is the step of the script's optimizer as it was before.
    """
    needs(2)
    model = Net().double()
    first = sgd(model)
    options = {"steps": 1} if paradigm == "local-sgd" else {}
    kept_step, optimizers = first.step, [Warmup(first)] * 2 + [sgd(model)]
    steps = []
    with hpcsync.connect(model, first, paradigm, out=folder / "run", comm=comm, **options) as sync:
        for optimizer, batch in zip(optimizers, sync.shard(data(BATCH * sync.n_workers * 3), BATCH), strict=False):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if optimizer is optimizers[-1]:
                before = copy.deepcopy(model.state_dict())
                for step in (optimizer.step, kept_step):
                    with pytest.raises(JobError, match="optimizer SGD: must be given to connect, and its step be call"):
                        step()
                model.load_state_dict(before)
                first.step()
            else:
                optimizer.step()
            steps.append(optimizer)
    assert steps == (optimizers if sync.worker is not None else [])
    loss_of(model, data(BATCH).tensors).backward()
    optimizers[-1].step()


def test_servers_refuse_other_wrappers(comm, needs, folder):
    needs(2)
    model = Net().double()
    with pytest.raises(JobError, match='Lookahead: must not wrap another optimizer with paradigm.name = "bsp"'):
        hpcsync.connect(model, lookahead(model), "bsp", out=folder / "run", comm=comm)


def test_the_state_that_an_optimizer_has_may_be_loaded_again(comm, needs, folder):
    """As Accelerate does after `connect`; another state would come too late."""
    needs(2)
    model = Net().double()
    optimizer = loaded(model)
    with hpcsync.connect(model, optimizer, "bsp", out=folder / "run", comm=comm) as sync:
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1.0
        with pytest.raises(RuntimeError, match="its state is on the servers by now"):
            optimizer.load_state_dict(state)
        with_closure(model, optimizer, sync.shard(data(BATCH * STEPS * comm.size), BATCH), sync)


def test_a_step_within_a_backward_pass_is_refused_where_backward_forms_the_mean(comm, needs, folder):
    needs(2)
    model = Net().double()
    optimizers = [torch.optim.SGD([p], lr=0.05) for p in model.parameters()]
    with hpcsync.connect(model, optimizers, "allreduce", out=folder / "run", comm=comm) as sync:
        model.head.bias.register_post_accumulate_grad_hook(lambda p: optimizers[-1].step())
        for batch in sync.shard(data(BATCH * comm.size), BATCH):
            with pytest.raises(JobError, match='step: must not be called within backward with paradigm.name = "allr'):
                loss_of(model, batch).backward()
            model.head.bias._post_accumulate_grad_hooks.clear()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()


def test_a_backward_pass_within_another_is_refused_where_backward_forms_the_mean(comm, needs, folder):
    """The mean would be formed at the end of the inner one."""
    needs(2)
    model = Net().double()
    optimizer = sgd(model)
    with hpcsync.connect(model, optimizer, "allreduce", out=folder / "run", comm=comm) as sync:
        for x, y in sync.shard(data(BATCH * comm.size), BATCH):
            below = nn.Sequential(model.body, model.norm, nn.Tanh())
            hidden = torch.utils.checkpoint.checkpoint(below, x.requires_grad_(), use_reentrant=True)
            with pytest.raises(RuntimeError, match="activation checkpointing needs use_reentrant=False"):
                nn.functional.mse_loss(model.head(hidden), y).backward()
            optimizer.step()


def test_batches_accumulated_without_a_word_are_refused_where_backward_forms_the_mean(comm, needs, folder):
    """Their samples would not be counted."""
    needs(2)
    model = Net().double()
    optimizer = sgd(model)
    with hpcsync.connect(model, optimizer, "allreduce", out=folder / "run", comm=comm) as sync:
        first, second, *_ = sync.shard(data(BATCH * 4 * comm.size), BATCH)  # drawn in advance
        loss_of(model, first).backward()
        with pytest.raises(RuntimeError, match="several backward passes in one step"):
            loss_of(model, second).backward()
        optimizer.step()
        batches = sync.shard(data(BATCH * 4 * comm.size), BATCH)
        loss_of(model, next(batches)).backward()
        second = next(batches)
        with pytest.raises(RuntimeError, match="several backward passes in one step"):
            loss_of(model, second).backward()
        optimizer.step()
