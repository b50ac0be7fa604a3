import copy

import pytest
import torch
from torch import nn

from hpcsync.config.errors import JobError
from hpcsync.training.buffers import Buffers, recompute_statistics


class Model(nn.Module):
    """Buffers of many types, one of them shared, one empty, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("narrow", torch.tensor([[0.1, -float("inf")]], dtype=torch.bfloat16), persistent=False)
        self.register_buffer("pair", torch.tensor(1.0 + 2.0j, dtype=torch.complex128))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor([3, -5], dtype=torch.int16))
        self.other = nn.Module()
        self.other.register_buffer("tied", self.count)


def test_all_types_return_bit_for_bit():
    model = Model()
    model.norm.running_mean += torch.randn(3, dtype=torch.float64)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = Buffers(model)
    vector = buffers.packed()
    assert vector.dtype == torch.int64 and vector.shape == (buffers.n_words,)
    for buffer in model.buffers():
        buffer.zero_()
    buffers.adopt([vector])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert model.other.tied is model.count


@pytest.mark.parametrize("choice", ["worker", "mean"])
def test_the_choice(choice):
    model = Model()
    buffers = Buffers(model, choice)
    vectors = []
    for worker in range(3):
        model.norm.running_mean.fill_(float(worker**2))
        model.norm.num_batches_tracked.fill_(7 - worker)
        model.mask[1] = worker == 2
        vectors.append(buffers.packed())
    buffers.adopt(vectors)
    mean = choice == "mean"
    assert (model.norm.running_mean == (5.0 / 3.0 if mean else 0.0)).all()
    assert int(model.norm.num_batches_tracked) == 7
    assert bool(model.mask[1]) == mean
    assert torch.equal(model.narrow, Model().narrow), "equal values stay, infinite ones too"


def test_parts_may_have_owners_and_nothing_changes_without_a_vector():
    model = Model()
    buffers = Buffers(model)
    first = buffers.packed()
    model.norm.running_mean.fill_(2.0)
    model.norm.running_var.fill_(3.0)
    second = buffers.packed()
    buffers.adopt([])
    assert (model.norm.running_mean == 2.0).all()
    names = [name for name, _ in model.named_buffers()]
    buffers.adopt([first, second], [int(name == "norm.running_var") for name in names])
    assert (model.norm.running_mean == 0.0).all() and (model.norm.running_var == 3.0).all()


def test_other_buffers_than_at_the_beginning_are_refused():
    model = Model()
    buffers = Buffers(model)
    vector = buffers.packed()
    model.norm.running_mean = torch.zeros(4)
    for use in (buffers.packed, lambda: buffers.adopt([vector])):
        with pytest.raises(JobError, match=r"buffers norm\.running_mean have been added, removed, or changed"):
            use()


def test_a_model_without_buffers_has_no_words():
    buffers = Buffers(nn.Linear(2, 2), "mean")
    assert buffers.n_words == 0
    assert buffers.packed().shape == (0,)
    buffers.adopt([buffers.new()])


def test_statistics_are_recomputed_without_dropout_and_modes_stay():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2, momentum=0.3))
    model[1].running_mean.fill_(9.0)
    model.eval()
    model[1].train()
    batches = [torch.randn(5, 2) for _ in range(4)]
    before, state = copy.deepcopy(model), torch.get_rng_state()
    recompute_statistics(model, batches, lambda model, x: model(x))
    assert torch.equal(torch.get_rng_state(), state), "no numbers are drawn"
    expected = torch.stack([x.mean(0) for x in batches]).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected)
    assert int(model[1].num_batches_tracked) == 4
    assert [module.training for module in model.modules()] == [module.training for module in before.modules()]
    assert model[1].momentum == 0.3
    torch.optim.swa_utils.update_bn(batches, before.train())
    assert not torch.allclose(before[1].running_mean, expected), "dropout would be noticed"
