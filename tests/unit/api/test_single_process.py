"""A script that trains as a single process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsync
from hpcsync.config.errors import JobError

DATA = TensorDataset(torch.linspace(-1, 1, 96).view(24, 4), torch.linspace(0, 1, 24).view(24, 1))


def test_layers_that_are_in_evaluation_mode_stay_there():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    before = model[1].running_mean.clone()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate(judged: nn.Module) -> tuple[float, float]:
        judged.eval()
        return 0.0, 0.0

    with hpcsync.connect(model, sgd, evaluate=evaluate, every_samples=8) as sync:
        for x, y in sync.shard(DataLoader(DATA, 4)):
            assert model.training and model[0].training and not model[1].training
            sgd.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            sgd.step()
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_clipped_is_the_gradient_without_the_scale_of_a_scaler(fused):
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hpcsync.connect(model, sgd, clip_norm=0.001) as sync:
        for step, (x, y) in enumerate(sync.shard(DataLoader(DATA, 12))):
            if step == 0:  # without the scaler
                nn.functional.mse_loss(model(x), y + 5.0).backward()
                sgd.step()
                sgd.zero_grad()
                before = torch.cat([p.detach().flatten() for p in model.parameters()])
                continue
            scaler.scale(nn.functional.mse_loss(model(x), y + 5.0)).backward()
            scaler.step(sgd)
            scaler.update()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.001, rel=1e-3)


def test_optimizers_step_one_after_the_other_with_one_gradient_and_the_run_may_end_between_them():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    seen = 0
    with hpcsync.connect(model, optimizers, stop={"updates": 3}) as sync:
        for x, y in sync.shard(DataLoader(DATA, 4)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            seen += 1
    assert seen == 2


@pytest.mark.parametrize("stop", [{}, {"updates": 4}])
def test_a_loop_may_draw_its_next_batch_before_each_step(stop):
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with hpcsync.connect(model, sgd, stop=stop) as sync:
        batches = iter(sync.shard(DataLoader(DATA, 4)))
        batch, steps = next(batches), []
        while batch is not None:
            following = next(batches, None)
            sgd.zero_grad()
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
            before = model.weight.detach().clone()
            sgd.step()
            steps.append(not torch.equal(model.weight, before))
            batch = following
        if not stop:
            with pytest.raises(JobError, match="step was called without a batch"):
                sgd.step()  # control: nor has a gradient been computed
    assert steps == ([True] * 4 + [False] if stop else [True] * 6)


def test_a_loss_of_several_numbers_is_refused_where_it_is_recorded():
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with hpcsync.connect(model, sgd) as sync:
        for x, y in sync.shard(DataLoader(DATA, 4)):
            losses = (model(x) - y) ** 2
            sgd.zero_grad()
            losses.mean().backward()
            with pytest.raises(ValueError, match=r"loss of shape \(4, 1\): must be one number, such as the mean"):
                sync.step(losses)
            sync.step(losses.mean().view(1, 1))


def test_a_model_without_memory_is_refused_as_the_model_that_it_is():
    model = nn.Linear(4, 1, device="meta")
    with pytest.raises(JobError, match="^model: must be on the CPU or on one GPU as a whole, not on meta$"):
        hpcsync.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
