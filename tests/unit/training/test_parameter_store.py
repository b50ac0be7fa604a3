"""A store: the same bits for any number of shards, and every reader sees exactly the version it was promised."""

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.nn import functional

from hpcsync.core.roles import Roles
from hpcsync.training.optimizers import ELEMENTWISE, OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.update_rules import Descent, Rule
from tests.stateful import STATEFUL, assert_caught

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
    return Store(rows, slots, done, Descent(optimizer.on_server), size), slots[:, :size], done


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
    for shard in Roles(n_shards, 3).shards(size):
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
        for shard in Roles(n_shards, 2).shards(101):
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


# ---- any order of events that obeys the protocol ----


def pick(candidates: Iterable[int], number: int) -> int:
    """Return one of the candidates, the same for the same number."""
    candidates = sorted(candidates)
    return candidates[number % len(candidates)]


NUMBERS = st.integers(0, 60)


class Readers(RuleBasedStateMachine):
    """Workers, an evaluator and a server around a store, beside a plain model of it.

    A worker is granted a version, reads it, contributes, and is granted again once its contribution is taken. Its word
    of `done` may come later than its contribution. A version that readers cannot reach yet is exposed later. All
    numbers are exact in float64.
    """

    store_class = Store
    n_shared: int | None = None  # buffers that readers can reach; None: as many as are ever needed
    missing_buffers = 0
    grants_first = False  # whether workers are promised the version from which the update of their contributions starts

    @initialize(n_workers=st.integers(1, 3))
    def begin(self, n_workers: int) -> None:
        self.n_workers = self.evaluator = n_workers
        self.history = [np.zeros(2)]  # all versions
        self.sum = np.zeros(2)  # of the next update
        self.in_slot: dict[int, np.ndarray] = {}  # contributions that no update has taken
        self.waiting: set[int] = set()  # workers whose push is to be answered, with their contribution in the slot
        self.idle: set[int] = set()  # workers to be granted
        self.dead: set[int] = set()
        self.promised: dict[int, tuple[int, int, int]] = {}  # by reader that may be reading: buffer, serial, version
        self.hidden: dict[int, tuple[int, int]] = {}  # by reader that waits for a buffer: serial, version
        self.unsaid: dict[int, int] = {}  # by worker that has contributed before it said that it has read: buffer
        self.version_read = [0] * (n_workers + 1)
        self.done = np.zeros(n_workers + 1, np.int64)
        self.slots = torch.full((n_workers, row_size(2)), torch.nan, dtype=torch.float64)
        self.slots[:, 2:] = 0
        self.new_store()
        for worker in range(n_workers):
            self.promise(worker)

    def new_store(self) -> None:
        n = self.n_shared or n_buffers(self.n_workers, self.grants_first) - self.missing_buffers
        self.buffers = torch.full((n, row_size(2)), torch.nan, dtype=torch.float64)
        self.buffers[:, 2:] = 0
        self.buffers[0, :2] = 0
        self.done[:] = 0
        self.unsaid.clear()
        self.store = self.store_class(self.buffers, self.slots, self.done, self.new_rule(), 2)

    def new_rule(self) -> Rule:
        return Descent(SGD.on_server)

    def promise(self, reader: int, contributing: bool = False) -> None:
        _, serial = self.store.pin(reader, contributing)
        self.version_read[reader] = len(self.history) - 1
        self.hidden[reader] = (serial, self.version_read[reader])
        if not contributing:
            self.expose(reader)

    def expose(self, reader: int) -> None:
        read = {buffer for buffer, *_ in self.promised.values()}
        if (buffer := self.store.expose(reader)) is None:
            read.update(self.unsaid.values())
            read.update(self.store._pinned[other] for other in self.hidden)  # may be exposed already, with another's
            assert read >= set(range(self.store.n_shared)), "a reader waits only for readers"
        else:
            self.promised[reader] = (buffer, *self.hidden.pop(reader))

    @precondition(lambda self: self.hidden)
    @rule(number=NUMBERS)
    def polls(self, number: int) -> None:
        self.expose(pick(self.hidden, number))

    def computing(self) -> set[int]:
        return set(range(self.n_workers)) - self.waiting - self.idle - self.dead - self.hidden.keys()

    @precondition(lambda self: self.promised)
    @rule(number=NUMBERS)
    def says_that_it_has_read(self, number: int) -> None:
        reader = pick(self.promised, number)
        _, self.done[reader], _ = self.promised.pop(reader)

    @precondition(lambda self: not self.grants_first and self.computing() - self.in_slot.keys())
    @rule(number=NUMBERS, values=st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
    def contributes(self, number: int, values: tuple[int, int]) -> None:
        worker = pick(self.computing() - self.in_slot.keys(), number)
        self.put(worker, values)
        self.waiting.add(worker)

    def put(self, worker: int, values: tuple[int, int]) -> None:
        if worker in self.promised:
            self.unsaid[worker], *_ = self.promised.pop(worker)
        self.slots[worker, :2] = torch.tensor(values)
        self.in_slot[worker] = np.array(values, float)

    def taken(self, worker: int) -> np.ndarray:
        """Return a contribution that the store has taken; its slot may be overwritten now."""
        self.slots[worker, :2] = torch.nan
        self.idle |= self.waiting & {worker}
        self.waiting.discard(worker)
        self.unsaid.pop(worker, None)
        return self.in_slot.pop(worker)

    @precondition(lambda self: self.waiting)
    @rule(number=NUMBERS, weight=st.sampled_from([0.5, 1.0, 2.0]))
    def accumulates(self, number: int, weight: float) -> None:
        worker = pick(self.waiting, number)
        self.store.accumulate(worker, weight)
        self.sum = self.sum + weight * self.taken(worker)

    @precondition(lambda self: self.in_slot)
    @rule(
        number=NUMBERS,
        n=st.integers(1, 4),
        lr=st.sampled_from([1.0, 2.0]),
        divisor=st.sampled_from([1.0, 2.0, None]),
        weight=st.sampled_from([0.5, 2.0, None]),
    )
    def updates(self, number: int, n: int, lr: float, divisor: float | None, weight: float | None) -> None:
        workers = sorted(self.in_slot, key=lambda worker: (worker + number) % self.n_workers)[:n]
        divisor = 2.0 if divisor is None and len(workers) == 3 else divisor  # a third would not be exact
        weights = () if weight is None else [weight] * len(workers)
        alone = not (self.promised or self.hidden or self.new_rule().corrects) and self.in_slot.keys() <= set(workers)
        before = self.store.current
        self.store.apply(workers, lr, weights, divisor)
        assert not alone or self.store.current == before, "without readers an update is in place"
        self.model_update(workers, lr, weight or 1.0, divisor or len(workers))

    @precondition(lambda self: self.grants_first and self.computing())
    @rule(number=NUMBERS, n=st.integers(1, 4), values=st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
    def exchange(self, number: int, n: int, values: tuple[int, int]) -> None:
        workers = sorted(self.computing(), key=lambda worker: (worker + number) % self.n_workers)[:n]
        for worker in workers:
            self.put(worker, values)
            self.promise(worker, contributing=True)
        self.store.apply(workers, 1.0, (), 1.0)
        self.model_update(workers, 1.0, 1.0, 1.0)
        for worker in workers:
            self.expose(worker)

    def model_update(self, workers: list[int], lr: float, weight: float, divisor: float) -> None:
        total = self.sum + sum(weight * self.taken(worker) for worker in workers)
        self.history.append(self.history[-1] - lr * total / divisor)
        self.sum = np.zeros(2)

    @precondition(lambda self: self.idle)
    @rule(number=NUMBERS)
    def is_granted(self, number: int) -> None:
        worker = pick(self.idle, number)
        self.idle.discard(worker)
        self.promise(worker)

    @precondition(lambda self: self.evaluator not in self.promised.keys() | self.hidden.keys())
    @rule()
    def is_evaluated(self) -> None:
        self.promise(self.evaluator)

    def mortal(self) -> set[int]:
        return set(range(self.n_workers)) - self.dead

    @precondition(lambda self: self.mortal())
    @rule(number=NUMBERS)
    def dies(self, number: int) -> None:
        worker = pick(self.mortal(), number)
        self.store.discard(worker)
        for of_reader in (self.promised, self.hidden, self.unsaid):
            of_reader.pop(worker, None)
        self.waiting.discard(worker)
        self.idle.discard(worker)
        self.dead.add(worker)  # its contribution stays

    @precondition(lambda self: self.dead - self.in_slot.keys())
    @rule(number=NUMBERS)
    def joins_again(self, number: int) -> None:
        worker = pick(self.dead - self.in_slot.keys(), number)
        self.dead.discard(worker)
        self.idle.add(worker)

    @precondition(lambda self: not (self.promised or self.hidden))
    @rule()
    def resumes_from_a_checkpoint(self) -> None:
        state = copy.deepcopy(self.store.state())
        self.new_store()
        self.store.restore(state)
        self.idle |= self.computing()

    @invariant()
    def the_store_equals_the_model(self) -> None:
        assert self.store.version == len(self.history) - 1, "versions count updates"
        assert self.store.weights.tolist() == self.history[-1].tolist(), "every contribution counts once"
        assert not self.store._buffers[self.store.current][2:].any(), "padding is zero"

    @invariant()
    def every_reader_sees_its_version(self) -> None:
        for reader, (buffer, _, version) in self.promised.items():
            seen = self.buffers[buffer, :2].tolist()
            assert seen == self.history[version].tolist(), f"reader {reader} sees {seen}, a version not promised"


class ContributorsThatRead(Readers):
    grants_first = True


class FewBuffers(Readers):
    n_shared = 2


class OneBuffer(Readers):
    n_shared = 1


class FewBuffersAndContributorsThatRead(ContributorsThatRead):
    n_shared = 2


class Corrected(Descent):
    """A rule that adds a number to every contribution, which depends on the weights it was computed from."""

    corrects = True

    def correct(self, worker, contribution, read):
        contribution.add_(read.round().remainder(16))


class Corrections(Readers):
    """A worker's version must stay until its contribution has been used, which is only used while the worker lives."""

    def new_rule(self) -> Rule:
        return Corrected(SGD.on_server)

    def mortal(self) -> set[int]:
        return super().mortal() - self.in_slot.keys()

    def taken(self, worker: int) -> np.ndarray:
        return super().taken(worker) + np.remainder(np.round(self.history[self.version_read[worker]]), 16)


class FewBuffersAndCorrections(Corrections):
    n_shared = 2


MACHINES = [
    Readers,
    ContributorsThatRead,
    FewBuffers,
    OneBuffer,
    FewBuffersAndContributorsThatRead,
    Corrections,
    FewBuffersAndCorrections,
]


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_events(machine):
    run_state_machine_as_test(machine, settings=STATEFUL)


class OverwritesPinnedVersions(Store):
    def _make_writable(self) -> None:
        pass


class OverwritesExposedVersions(Store):
    def _free_shared(self) -> int | None:
        found = super()._free_shared()
        return 0 if found is None else found


class LeavesPromisesBehind(Store):
    def _copy_pinned(self, buffer: int, to: int) -> None:
        before = self._pinned
        super()._copy_pinned(buffer, to)
        self._pinned = before


class WaitsForUpdates(Store):
    def _free_shared(self) -> int | None:
        needed = self._needed() | {self.current}
        return next((buffer for buffer in range(self.n_shared) if buffer not in needed), None)


class ForgetsCorrections(Store):
    def _needed(self) -> set[int]:
        return self._pinned_by(self._done.tolist())


class TakesContributorsToHaveRead(Store):
    def pin(self, reader: int, contributing: bool = False) -> tuple[int, int]:
        return super().pin(reader)


class IgnoresAccumulated(Store):
    def accumulate(self, worker: int, weight: float) -> None:
        self._has_read(worker)


class CountsAccumulatedTwice(Store):
    def apply(self, *args: Any) -> None:
        has_accumulated = self._has_accumulated
        super().apply(*args)
        self._has_accumulated = has_accumulated


class ForgetsSums(Store):
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "accumulated": None})


def replayed(machine: type[Readers], history: list[tuple[Any, ...]]) -> None:
    """Make these steps of a machine, each a rule and its arguments, with its invariants after each."""
    state = machine()
    for rule_name, *arguments in history:
        getattr(state, rule_name)(*arguments)
        state.the_store_equals_the_model()
        state.every_reader_sees_its_version()


UPDATE = ("updates", 0, 1, 1.0, 1.0, 0.5)  # with half of the contribution of the first worker that has one
# Found by random search, made as short as possible. (A search each time takes a minute for all.)
HISTORIES = [
    (
        Readers,
        OverwritesPinnedVersions,
        "a version not promised",
        [("begin", 1), ("is_evaluated",), ("contributes", 0, (0, 1)), UPDATE],
    ),
    (
        ContributorsThatRead,
        TakesContributorsToHaveRead,
        "a version not promised",
        [("begin", 3), ("dies", 0), ("dies", 0), ("exchange", 0, 1, (0, 1))],
    ),
    (
        Readers,
        IgnoresAccumulated,
        "every contribution counts once",
        [
            *[("begin", 1), ("contributes", 0, (0, 1)), ("accumulates", 0, 0.5)],
            *[("is_granted", 0), ("contributes", 0, (0, 0)), UPDATE],
        ],
    ),
    (
        Readers,
        CountsAccumulatedTwice,
        "every contribution counts once",
        [
            *[("begin", 3), ("contributes", 0, (0, 0)), ("contributes", 0, (0, 1)), ("accumulates", 0, 0.5), UPDATE],
            *[("contributes", 0, (0, 0)), UPDATE],
        ],
    ),
    (
        Readers,
        ForgetsSums,
        "every contribution counts once",
        [
            *[("begin", 1), ("contributes", 0, (0, 1)), ("accumulates", 0, 0.5), ("is_granted", 0)],
            *[("contributes", 0, (0, 0)), ("resumes_from_a_checkpoint",), UPDATE],
        ],
    ),
    (
        FewBuffers,
        OverwritesPinnedVersions,
        "a version not promised",
        [("begin", 1), ("is_evaluated",), ("contributes", 0, (0, 1)), UPDATE],
    ),
    (
        FewBuffers,
        OverwritesExposedVersions,
        "a version not promised",
        [
            *[("begin", 2), ("is_evaluated",), ("contributes", 1, (0, 1)), UPDATE, ("is_granted", 0)],
            *[("contributes", 0, (0, 0)), UPDATE, ("is_granted", 0)],
        ],
    ),
    (
        FewBuffersAndCorrections,
        LeavesPromisesBehind,
        "every contribution counts once",
        [
            *[("begin", 2), ("contributes", 1, (0, 2)), ("is_evaluated",), ("contributes", 0, (0, 0)), UPDATE],
            *[("is_granted", 0), ("says_that_it_has_read", 0), UPDATE, ("contributes", 0, (0, 0)), UPDATE],
        ],
    ),
    (
        OneBuffer,
        WaitsForUpdates,
        "a reader waits only for readers",
        [
            *[("begin", 3), ("contributes", 0, (0, 0)), UPDATE, ("is_granted", 0), ("contributes", 0, (0, 0))],
            *[("contributes", 0, (0, 0)), ("updates", 0, 2, 1.0, 1.0, 0.5), ("polls", 0)],
        ],
    ),
    (
        FewBuffersAndCorrections,
        WaitsForUpdates,
        "a reader waits only for readers",
        [
            *[("begin", 3), ("contributes", 0, (0, 0)), ("says_that_it_has_read", 0), ("says_that_it_has_read", 0)],
            *[("resumes_from_a_checkpoint",), ("is_evaluated",), UPDATE, ("is_granted", 0)],
        ],
    ),
    (
        Corrections,
        ForgetsCorrections,
        "every contribution counts once",
        [
            *[("begin", 3), ("says_that_it_has_read", 0), ("contributes", 1, (0, 2)), ("says_that_it_has_read", 0)],
            *[UPDATE, ("contributes", 0, (0, 0)), UPDATE],
        ],
    ),
    (
        FewBuffersAndCorrections,
        ForgetsCorrections,
        "every contribution counts once",
        [
            *[("begin", 3), ("says_that_it_has_read", 0), ("contributes", 1, (0, 2)), ("says_that_it_has_read", 0)],
            *[("contributes", 0, (0, 0)), ("updates", 8, 1, 1.0, 1.0, 0.5), UPDATE],
        ],
    ),
]


@pytest.mark.parametrize(("machine", "broken", "message", "history"), HISTORIES)
def test_a_broken_store_is_caught(machine, broken, message, history):
    replayed(machine, history)
    with pytest.raises(AssertionError, match=message):
        replayed(type("Broken", (machine,), {"store_class": broken}), history)


class ForgetsThatTheyHaveRead(Store):
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._done[:] = 0


def test_after_a_resume_no_reader_waits_for_a_version_that_only_a_correction_needs():
    history = [
        *[("begin", 3), ("contributes", 0, (0, 0)), ("says_that_it_has_read", 0), ("says_that_it_has_read", 0)],
        *[("resumes_from_a_checkpoint",), ("is_evaluated",), UPDATE, ("is_granted", 0)],
    ]
    replayed(FewBuffersAndCorrections, history)
    with pytest.raises(AssertionError, match="a reader waits only for readers"):
        replayed(type("Broken", (FewBuffersAndCorrections,), {"store_class": ForgetsThatTheyHaveRead}), history)


class NeedsNoPrivateMemory(Readers):
    @invariant()
    def no_version_is_in_private_memory(self) -> None:
        assert len(self.store._buffers) == self.store.n_shared, "in private memory"


class NeedsNoPrivateMemoryForContributors(NeedsNoPrivateMemory):
    grants_first = True


@pytest.mark.parametrize("machine", [NeedsNoPrivateMemory, NeedsNoPrivateMemoryForContributors])
def test_with_all_buffers_no_version_is_in_private_memory(machine):
    run_state_machine_as_test(machine, settings=STATEFUL)


@pytest.mark.parametrize("machine", [NeedsNoPrivateMemory, NeedsNoPrivateMemoryForContributors])
def test_one_buffer_less_does_not_suffice_for_that(machine):
    assert_caught(type("Scarce", (machine,), {"missing_buffers": 1}), "in private memory")
