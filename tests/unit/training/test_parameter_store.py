"""A store: the same bits for any number of shards, and every reader sees exactly the version it was promised."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from hpcsync.core.roles import Roles
from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.update_rules import Descent

SGD = OptimizerSpec("sgd", 1.0)


def make_store(weights: torch.Tensor, n_workers: int, optimizer: OptimizerSpec = SGD, buffers: int = 0):
    """Return a store of these weights, its slots, and the readers' words of `done`."""
    size = len(weights)
    rows = torch.zeros(buffers or n_buffers(n_workers), row_size(size), dtype=weights.dtype)
    rows[1:, :size] = torch.nan
    rows[0, :size] = weights
    slots = torch.zeros(n_workers, row_size(size), dtype=weights.dtype)
    slots[:, :size] = torch.nan
    done = np.zeros(n_workers + 1, np.int64)
    return Store(rows, slots, done, Descent(optimizer), size), slots[:, :size], done


# ---- the bits do not depend on the shards ----

# By the names of torch.optim and what makes its longest formula.
OPTIMIZERS = [
    *((name, {}) for name in ELEMENTWISE),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {"weight_decay": 0.01, "amsgrad": True}),
    ("adamw", {"amsgrad": True, "maximize": True}),
    ("adagrad", {"weight_decay": 0.1, "lr_decay": 0.1}),
    ("rmsprop", {"centered": True, "momentum": 0.9}),
    ("asgd", {"t0": 2.0, "weight_decay": 0.1}),
]


def train(optimizer: OptimizerSpec, n_shards: int, size: int, dtype: torch.dtype, order=(0, 1, 2)) -> torch.Tensor:
    """Return the weights after a few updates of three workers each, from one store per shard."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.randn(size, generator=generator, dtype=dtype)
    gradients = torch.randn(4, 3, size, generator=generator, dtype=dtype)
    result = torch.empty_like(weights)
    for server in range(n_shards):
        shard = Roles(n_shards, 3).shard(server, size)
        store, slots, _ = make_store(weights[shard], 3, optimizer)
        for i, contributions in enumerate(gradients):
            slots.copy_(contributions[:, shard])
            store.apply(order, lr=0.01 / (i + 1))
        result[shard] = store.weights
    return result


def name_of(value: object) -> str:
    return "-".join([value[0], *value[1]]) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_the_number_of_shards_does_not_change_a_bit(optimizer, dtype):
    spec = OptimizerSpec(optimizer[0], 0.01, optimizer[1])
    for size in (7, 37, 101, 1003):
        whole = train(spec, 1, size, dtype)
        assert torch.isfinite(whole).all()
        for n_shards in (2, 3, 7):
            assert torch.equal(train(spec, n_shards, size, dtype), whole), f"{n_shards} shards of {size}"


def test_without_whole_rows_the_shards_show_in_the_bits(monkeypatch):
    monkeypatch.setitem(globals(), "row_size", lambda size: size)
    spec = OptimizerSpec("adam", 0.01, {"weight_decay": 0.01})
    assert any(
        not torch.equal(train(spec, n_shards, size, torch.float32), train(spec, 1, size, torch.float32))
        for size in (7, 37, 101, 1003)
        for n_shards in (2, 3, 7)
    )


def test_an_optimizer_that_is_not_elementwise_shows_in_the_bits(monkeypatch):
    monkeypatch.setitem(ELEMENTWISE, "adafactor", torch.optim.Adafactor)
    spec = OptimizerSpec("adafactor", 0.01)
    assert not torch.equal(train(spec, 3, 101, torch.float32), train(spec, 1, 101, torch.float32))


def test_the_order_of_the_sum_shows_in_the_bits():
    assert not torch.equal(train(SGD, 1, 1003, torch.float32), train(SGD, 1, 1003, torch.float32, order=(2, 1, 0)))


# ---- one update ----


def test_an_update_is_the_mean_summed_in_the_order_given():
    store, slots, _ = make_store(torch.zeros(1), 3)
    slots.copy_(torch.tensor([[1e8], [1.0], [-1e8]]))
    store.apply([0, 2, 1], lr=3.0)  # exact; in worker order the 1 would be lost
    assert store.weights.tolist() == [-1.0]
    slots.copy_(torch.tensor([[1e8], [1.0], [-1e8]]))
    store.apply([0, 1, 2], lr=3.0)
    assert store.weights.tolist() == [-1.0]


def test_an_update_is_of_the_workers_named_and_no_others():
    store, slots, _ = make_store(torch.zeros(2), 3)
    slots[2] = torch.tensor([4.0, 8.0])
    store.apply([2], lr=0.5)
    assert store.weights.tolist() == [-2.0, -4.0]
    slots[0], slots[2] = 1.0, 3.0
    store.apply([0, 2], lr=0.25)
    assert store.weights.tolist() == [-2.5, -4.5]


def test_the_learning_rate_is_the_one_passed_and_not_the_initial_one():
    store, slots, _ = make_store(torch.zeros(1), 1, OptimizerSpec("sgd", 100.0))
    for lr, expected in ((0.5, -0.5), (2.0, -2.5), (0.0, -2.5)):
        slots.fill_(1.0)
        store.apply([0], lr)
        assert store.weights.tolist() == [expected]


def test_the_version_counts_updates():
    store, slots, _ = make_store(torch.zeros(1), 2)
    assert store.version == 0
    for workers in ([0], [0, 1], [1]):
        slots.fill_(1.0)
        store.apply(workers, 0.1)
    assert store.version == 3


def test_optimizer_state_follows_the_weights_from_buffer_to_buffer():
    gradients = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.Parameter(torch.zeros(row_size(5)))
    optimizer = torch.optim.SGD([expected], lr=0.1, momentum=0.9, fused=True)
    store, slots, _ = make_store(torch.zeros(5), 2, OptimizerSpec("sgd", 0.1, {"momentum": 0.9}))
    used = set()
    for gradient in gradients:
        expected.grad = functional.pad(gradient, (0, row_size(5) - 5))
        optimizer.step()
        store.pin(1)  # so that every update moves on to another buffer
        slots[0] = gradient
        store.apply([0], 0.1)
        used.add(store.current)
        assert torch.equal(store.weights, expected[:5])
    assert len(used) > 1


# ---- weights, and what is collected ----


def test_contributions_count_as_often_as_their_weights_say():
    store, slots, _ = make_store(torch.zeros(2), 2)
    slots[0], slots[1] = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    store.apply([0, 1], 1.0, [3.0, 0.5], 4.0)
    assert store.weights.tolist() == [-2.0, -4.0]


def test_accumulated_contributions_enter_the_next_update_only():
    store, slots, _ = make_store(torch.zeros(1), 2)
    for value, weight in ((1.0, 2.0), (10.0, 0.5), (100.0, 1.0)):
        slots[0] = value
        store.accumulate(0, weight)
        slots[0] = math.nan  # its worker continues
    slots[1] = 1000.0
    store.apply([1], 1.0, [3.0], 2.0)
    assert store.weights.tolist() == [-(2.0 + 5.0 + 100.0 + 3000.0) / 2]
    assert store.version == 1
    slots[0] = 4.0
    store.accumulate(0, 1.0)
    slots[1] = 2.0
    store.apply([1], 1.0, [1.0], 2.0)
    assert store.weights.tolist() == [-1553.5 - 3.0]
    slots[1] = 1.0
    store.apply([1], 1.0)
    assert store.weights.tolist() == [-1557.5]


def test_collecting_changes_neither_weights_nor_versions_and_says_that_its_worker_has_read():
    store, slots, done = make_store(torch.zeros(1), 2)
    buffer, serial = store.pin(0)
    slots.fill_(1.0)
    store.accumulate(0, 1.0)
    assert (store.weights.tolist(), store.version, done[0]) == ([0.0], 0, serial)
    store.apply([1], 1.0)
    assert store.current == buffer, "in place: there is no reader"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_collecting_is_the_same_sum_in_the_same_order_whatever_the_shards(dtype):
    generator = torch.Generator().manual_seed(1)
    gradients, weights = torch.randn(4, 101, generator=generator, dtype=dtype), (0.7, 1.3, 1.0, 0.9)
    results = []
    for n_shards in (1, 3):
        result = torch.empty(101, dtype=dtype)
        for server in range(n_shards):
            shard = Roles(n_shards, 2).shard(server, 101)
            store, slots, _ = make_store(torch.zeros(101, dtype=dtype)[shard], 2, OptimizerSpec("adam", 0.1))
            for gradient, weight in zip(gradients[:3], weights, strict=False):
                slots[0] = gradient[shard]
                store.accumulate(0, weight)
            slots[1] = gradients[3][shard]
            store.apply([1], 0.1, weights[3:], 4.0)
            result[shard] = store.weights
        results.append(result)
    assert torch.equal(*results)
    at_once, slots, _ = make_store(torch.zeros(101, dtype=dtype), 4, OptimizerSpec("adam", 0.1))
    slots.copy_(gradients)
    at_once.apply(range(4), 0.1, weights, 4.0)
    assert torch.equal(at_once.weights, results[0])


# ---- pinned versions ----


def test_without_readers_an_update_is_in_place():
    store, slots, done = make_store(torch.zeros(1), 2)
    buffer, serial = store.pin(0)
    done[0] = serial  # has read
    for _ in range(3):
        slots.fill_(1.0)
        store.apply([1], 1.0)
        assert store.current == buffer == 0
    assert store.weights.tolist() == [-3.0]


def test_a_pinned_version_is_left_as_it_was_until_its_reader_is_done():
    store, slots, done = make_store(torch.zeros(1), 2)
    buffer, serial = store.pin(0)
    pinned = store.weights
    for _ in range(3):
        slots.fill_(1.0)
        store.apply([1], 1.0)
        assert store.current != buffer
        assert pinned.tolist() == [0.0]
    store.pin(1)
    done[0] = serial
    slots.fill_(1.0)
    store.apply([1], 1.0)
    assert store.weights.tolist() == [-4.0]


@pytest.mark.parametrize("contributing", [False, True])
def test_a_discarded_worker_holds_no_buffer_and_its_contribution_counts(contributing):
    store, slots, _ = make_store(torch.zeros(1), 2)
    buffer, _ = store.pin(0, contributing)
    slots[0] = 1.0
    store.discard(0)
    store.apply([0], 1.0)
    assert store.current == buffer, "with a promise it would have moved on"
    assert store.weights.tolist() == [-1.0]


def test_a_contribution_says_that_its_worker_has_read():
    store, slots, _ = make_store(torch.zeros(1), 1)
    store.pin(0)
    slots.fill_(1.0)
    store.apply([0], 1.0)
    assert store.current == 0


def test_a_promise_that_is_made_to_a_contributor_lasts_beyond_its_update():
    store, slots, done = make_store(torch.zeros(1), 1, buffers=n_buffers(1, True))
    store.pin(0)
    for version in range(3):
        buffer, serial = store.pin(0, contributing=True)
        pinned = store.weights
        slots.fill_(1.0)
        store.apply([0], 1.0)
        assert store.current != buffer
        assert pinned.tolist() == [-version]
    done[0] = serial
    slots.fill_(1.0)
    store.apply([0], 1.0)
    assert store.current != buffer, "there is no reader, so it is in place"


def test_a_promise_that_does_not_say_so_ends_with_the_update():
    store, slots, _ = make_store(torch.zeros(1), 1)
    buffer, _ = store.pin(0)
    pinned = store.weights
    slots.fill_(1.0)
    store.apply([0], 1.0)
    assert store.current == buffer
    assert pinned.tolist() == [-1.0]


def test_an_old_serial_does_not_release_a_new_promise():
    store, slots, done = make_store(torch.zeros(1), 2)
    _, old = store.pin(0)
    buffer, new = store.pin(0)
    assert new > old
    done[0] = old
    slots.fill_(1.0)
    store.apply([1], 1.0)
    assert store.current != buffer


def obey(store: Store, slots: torch.Tensor, done: np.ndarray, picks, collects: bool = False) -> int:
    """Random events that obey the protocol; asserts after each that every reader sees what it was promised.

    picks: numbers that choose the next event among those that are possible. collects: whether some contributions are
    collected, and their workers read again. Returns how many updates were not in place.
    """
    n_workers = len(slots)
    reading, moves, expected = {}, 0, 0.0  # reader: (buffer, serial, what it must see); minus the sum of all
    contributed, idle = set(), set(range(n_workers + 1))  # workers with a spent or no promise, and the evaluator
    for pick in picks:
        events = [("done", reader) for reader in sorted(reading)]
        events += [("contribute", worker) for worker in sorted(set(range(n_workers)) - contributed - idle)]
        events += [("pin", reader) for reader in sorted(idle)]
        events += [("apply", None)] * 2 if contributed else []
        events += [("collect", worker) for worker in sorted(contributed)] if collects else []
        event, reader = events[pick % len(events)]
        if event == "pin":
            idle.remove(reader)
            reading[reader] = (*store.pin(reader), store.weights.clone())
        elif event == "done":
            _, done[reader], _ = reading.pop(reader)
            idle |= {reader} - set(range(n_workers))
        elif event == "contribute":
            reading.pop(reader, None)  # its own word of `done` may come later than its contribution
            contributed.add(reader)
            slots[reader] = pick + 1.0
            expected -= pick + 1.0
        elif event == "collect":
            store.accumulate(reader, 1.0)
            contributed.remove(reader)
            idle.add(reader)
        else:
            workers = sorted(contributed)[: 1 + pick % len(contributed)]
            before = store.current
            store.apply(workers, 1.0, [1.0] * len(workers), 1.0)
            moves += store.current != before
            contributed -= set(workers)
            idle |= set(workers)
            assert store.current not in [buffer for buffer, _, _ in reading.values()]
        for reader, (buffer, _, promised) in reading.items():
            assert torch.equal(store._buffers[buffer, : len(promised)], promised), (
                f"reader {reader} sees a version not promised"
            )
    if 0 not in contributed:
        contributed.add(0)
        slots[0] = 1.0
        expected -= 1.0
    store.apply(sorted(contributed), 1.0, [1.0] * len(contributed), 1.0)
    assert store.weights.tolist() == [expected] * len(store.weights), "every contribution counts once"
    return moves


@settings(deadline=None, derandomize=True, max_examples=150)
@given(n_workers=st.integers(1, 5), picks=st.lists(st.integers(0, 1000), min_size=20, max_size=120))
def test_every_reader_sees_its_version_and_the_buffers_suffice(n_workers, picks):
    obey(*make_store(torch.zeros(2), n_workers), picks)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(n_workers=st.integers(1, 5), picks=st.lists(st.integers(0, 1000), min_size=20, max_size=120))
def test_so_they_do_where_contributions_are_collected(n_workers, picks):
    obey(*make_store(torch.zeros(2), n_workers), picks, collects=True)


def test_a_contribution_applied_but_not_accumulated_is_missed(monkeypatch):
    monkeypatch.setattr(Store, "accumulate", lambda self, worker, weight: self._has_read(worker))
    with pytest.raises(AssertionError, match="every contribution counts once"):
        obey(*make_store(torch.zeros(2), 3), many_picks()[:999], collects=True)


def many_picks() -> list[int]:
    return np.random.default_rng(1).integers(0, 1000, 3000).tolist()


def test_the_random_events_do_meet_readers():
    assert obey(*make_store(torch.zeros(2), 3), many_picks()) > 100


def test_one_buffer_less_does_not_suffice():
    with pytest.raises(StopIteration):
        obey(*make_store(torch.zeros(2), 3, buffers=n_buffers(3) - 1), many_picks())


def test_without_moving_on_readers_see_torn_versions(monkeypatch):
    monkeypatch.setattr(Store, "_make_writable", lambda self: None)
    with pytest.raises(AssertionError):
        obey(*make_store(torch.zeros(2), 3), many_picks())


# ---- promises that are made before the update of their readers' contributions ----


def obey_grants_first(store: Store, slots: torch.Tensor, done: np.ndarray, picks, contributing: bool = True) -> int:
    """Like `obey`, but workers are promised the version from which the update of their contributions starts."""
    n_workers = len(slots)
    reading, moves = {}, 0
    for worker in range(n_workers):
        reading[worker] = (*store.pin(worker), store.weights.clone())
    for pick in picks:
        reader, kind = pick % (n_workers + 1), pick % 7
        if kind < 2 and reader in reading:
            _, done[reader], _ = reading.pop(reader)
        elif reader == n_workers:
            if reader not in reading:
                reading[reader] = (*store.pin(reader), store.weights.clone())
        else:
            workers = range(n_workers) if kind == 6 else [reader]
            for worker in workers:  # their words of `done` may come later than their contributions
                slots[worker] = pick + 1.0
                reading[worker] = (*store.pin(worker, contributing=contributing), store.weights.clone())
            before = store.current
            store.apply(workers, 1.0)
            moves += store.current != before
        for reader, (buffer, _, promised) in reading.items():
            assert torch.equal(store._buffers[buffer, : len(promised)], promised), (
                f"reader {reader} sees a version not promised"
            )
    return moves


@settings(deadline=None, derandomize=True, max_examples=100)
@given(n_workers=st.integers(1, 5), picks=st.lists(st.integers(0, 1000), min_size=20, max_size=120))
def test_contributors_that_read_see_their_version_and_one_buffer_more_suffices(n_workers, picks):
    obey_grants_first(*make_store(torch.zeros(2), n_workers, buffers=n_buffers(n_workers, True)), picks)


def test_contributors_that_read_need_that_buffer():
    enough = make_store(torch.zeros(2), 3, buffers=n_buffers(3, True))
    assert obey_grants_first(*enough, many_picks()) > 100
    with pytest.raises(StopIteration):
        obey_grants_first(*make_store(torch.zeros(2), 3, buffers=n_buffers(3)), many_picks())


def test_contributors_that_are_taken_to_have_read_see_torn_versions():
    store = make_store(torch.zeros(2), 3, buffers=n_buffers(3, True))
    with pytest.raises(AssertionError):
        obey_grants_first(*store, many_picks(), contributing=False)
