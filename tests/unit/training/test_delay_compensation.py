"""Delay compensation: the rule's formula, and a store that keeps the weights that each gradient was computed from."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsync.core.roles import Roles
from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.update_rules import DelayCompensated, Descent

SGD = OptimizerSpec("sgd", 1.0)
SIZE = 5


class Servers:
    """Stores of all servers, and the workers' words of `done`."""

    def __init__(self, weights, n_workers, rule, n_servers=1, store=Store):
        self.shards = Roles(n_servers, n_workers).shards(len(weights))
        self.stores, self.slots, self.done = [], [], []
        for shard in self.shards:
            size = shard.stop - shard.start
            rows = torch.full((n_buffers(n_workers), row_size(size)), torch.nan, dtype=weights.dtype)
            rows[:, size:], rows[0, :size] = 0, weights[shard]
            slots = torch.zeros(n_workers, row_size(size), dtype=weights.dtype)
            self.done.append(np.zeros(n_workers + 1, np.int64))
            self.slots.append(slots[:, :size])
            self.stores.append(store(rows, slots, self.done[-1], rule(), size))

    def read(self, worker):
        """Promise the current version to a worker, which has read it soon after."""
        for store, done in zip(self.stores, self.done, strict=True):
            _, done[worker] = store.pin(worker)

    def push(self, worker, gradient, lr=1.0):
        for store, slots, shard in zip(self.stores, self.slots, self.shards, strict=True):
            slots[worker] = gradient[shard]
            store.apply([worker], lr)

    @property
    def weights(self):
        return torch.cat([store.weights for store in self.stores])


class Reference:
    """The published algorithm in NumPy: a copy of the weights for each worker that read them."""

    def __init__(self, weights, n_workers, strength, decay=None):
        self.w = weights.copy()
        self.read_by = [self.w] * n_workers
        self.strength, self.decay = strength, decay
        self.mean_square = np.zeros((n_workers, len(weights)))

    def read(self, worker):
        self.read_by[worker] = self.w

    def push(self, worker, g, lr=1.0):
        square, correction = g * g, self.w - self.read_by[worker]
        correction = correction * square * self.strength
        if self.decay is not None:
            self.mean_square[worker] = self.mean_square[worker] * self.decay + square * (1 - self.decay)
            correction = correction / np.sqrt(self.mean_square[worker] + 1e-7)
        self.w = self.w - lr * (g + correction)


RULES = {"constant": (0.04, None), "adaptive": (2.0, 0.95)}
FORMS = pytest.mark.parametrize("form", RULES)


def compensated(form):
    return lambda: DelayCompensated(SGD.on_server, *RULES[form])


def schedule(n_workers, n_pushes=40, seed=1, size=SIZE):
    """Return pushes as workers and gradients; each worker reads right after its push."""
    generator = np.random.default_rng(seed)
    return [(int(worker), 0.2 * generator.normal(size=size)) for worker in generator.integers(0, n_workers, n_pushes)]


def play(servers, n_workers, pushes):
    for worker in range(n_workers):
        servers.read(worker)
    for worker, gradient in pushes:
        servers.push(worker, gradient)
        servers.read(worker)
    return servers.weights if isinstance(servers, Servers) else servers.w


def trained(form, n_workers, pushes, dtype=torch.float64, **kind):
    start = torch.linspace(-1, 1, len(pushes[0][1]), dtype=torch.float64).to(dtype)
    tensors = [(worker, torch.from_numpy(gradient).to(dtype)) for worker, gradient in pushes]
    rule = form if callable(form) else compensated(form)
    return play(Servers(start, n_workers, rule, **kind), n_workers, tensors)


def reference(form, n_workers, pushes):
    start = np.linspace(-1, 1, len(pushes[0][1]))
    return play(Reference(start, n_workers, *RULES[form]), n_workers, pushes)


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
@FORMS
def test_it_is_the_published_algorithm(form, n_workers):
    pushes = schedule(n_workers)
    expected = reference(form, n_workers, pushes)
    np.testing.assert_allclose(trained(form, n_workers, pushes).numpy(), expected, rtol=0, atol=1e-13)
    without = trained(lambda: Descent(SGD.on_server), n_workers, pushes).numpy()
    assert n_workers == 1 or np.abs(without - expected).max() > 1e-4


@pytest.mark.parametrize(
    "optimizer", [SGD, OptimizerSpec("sgd", 1.0, {"momentum": 0.9, "weight_decay": 0.01})], ids=str
)
@FORMS
def test_without_delay_it_is_plain_descent_to_the_bit(form, optimizer):
    pushes = schedule(1)
    rule = lambda: DelayCompensated(optimizer.on_server, *RULES[form])  # noqa: E731
    assert torch.equal(trained(rule, 1, pushes), trained(lambda: Descent(optimizer.on_server), 1, pushes))


def test_on_a_parabola_it_is_the_gradient_at_the_present_weights():
    """Of h w^2 / 2 with strength h / g^2 the corrected gradient is h w, as if there had been no delay."""
    h, w, read = 3.0, torch.tensor([0.5], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    gradient = h * read
    rule = DelayCompensated(SGD.on_server, h / float(gradient) ** 2)
    rule.bind(torch.nn.Parameter(w))
    rule.correct(0, gradient, read)
    assert float(gradient) == pytest.approx(h * float(w), rel=1e-15)


def test_each_worker_has_a_moving_average_of_its_own():
    pushes = [(0, np.full(SIZE, 0.5)), (1, np.full(SIZE, 4.0)), (0, np.full(SIZE, 0.5)), (1, np.full(SIZE, 4.0))]
    own = trained("adaptive", 2, pushes)
    np.testing.assert_allclose(own.numpy(), reference("adaptive", 2, pushes), rtol=0, atol=1e-14)

    class Shared(DelayCompensated):
        def correct(self, worker, contribution, read):
            super().correct(0, contribution, read)

    assert not torch.allclose(own, trained(lambda: Shared(SGD.on_server, *RULES["adaptive"]), 2, pushes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@FORMS
def test_the_number_of_servers_changes_no_bit(form, dtype):
    for size in (7, 101, 1003):
        pushes = schedule(3, 12, size=size)
        one = trained(form, 3, pushes, dtype)
        for n_servers in (2, 3, 7):
            assert torch.equal(trained(form, 3, pushes, dtype, n_servers=n_servers), one)


class Forgetful(Store):
    """A store that gives the weights free once they have been read."""

    def _needed(self):
        return self._pinned_by(self._done.tolist())


@FORMS
def test_what_a_gradient_was_computed_from_is_kept_until_it_arrives(form):
    pushes = [(1, np.full(SIZE, 0.5))] * 3 + [(0, np.full(SIZE, 2.0))]
    expected = reference(form, 2, pushes)
    np.testing.assert_allclose(trained(form, 2, pushes).numpy(), expected, rtol=0, atol=1e-14)
    forgotten = trained(form, 2, pushes, store=Forgetful).numpy()
    assert not np.allclose(forgotten, expected)


READS = st.lists(st.tuples(st.sampled_from("prled"), st.integers(0, 4)), max_size=60)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(n_workers=st.sampled_from([1, 2, 3, 5]), events=READS)
@FORMS
def test_in_any_order_of_pushes_joins_leaves_evaluations_and_checkpoints(form, n_workers, events):
    """Workers push, leave with or without a push to come, and join; an evaluator reads; the store is saved."""
    start = np.linspace(-1, 1, SIZE)
    servers, plain = (
        Servers(torch.from_numpy(start), n_workers, compensated(form)),
        Reference(start, n_workers, *RULES[form]),
    )
    active = set(range(n_workers))
    for worker in active:
        servers.read(worker), plain.read(worker)
    generator = np.random.default_rng(len(events))
    for kind, number in events:
        worker = number % n_workers
        if kind == "p" and worker in active:
            gradient = generator.integers(-4, 5, SIZE) / 8
            servers.push(worker, torch.from_numpy(gradient)), plain.push(worker, gradient)
            servers.read(worker), plain.read(worker)
        elif kind == "l":
            active.discard(worker)
            if number % 2:  # it died
                servers.stores[0].discard(worker)
        elif kind == "r" and worker not in active:
            active.add(worker)
            servers.read(worker), plain.read(worker)
        elif kind == "e":
            servers.read(n_workers)
        elif kind == "d":
            state = copy.deepcopy(servers.stores[0].state())
            servers = Servers(torch.zeros(SIZE, dtype=torch.float64), n_workers, compensated(form))
            servers.stores[0].restore(state)
        np.testing.assert_array_equal(servers.weights.numpy(), plain.w)


@FORMS
def test_a_checkpoint_without_the_weights_that_were_read_shows(form):
    pushes = schedule(3)

    def resumed(forget):
        servers = Servers(torch.linspace(-1, 1, SIZE, dtype=torch.float64), 3, compensated(form))
        tensors = [(worker, torch.from_numpy(gradient)) for worker, gradient in pushes]
        play(servers, 3, tensors[:20])
        state = copy.deepcopy(servers.stores[0].state())
        assert len(state["read"]) == 3, "each worker has read another version"
        servers = Servers(torch.zeros(SIZE, dtype=torch.float64), 3, compensated(form))
        servers.stores[0].restore(state | {"read": []} if forget else state)
        for worker, gradient in tensors[20:]:
            servers.push(worker, gradient)
            servers.read(worker)
        return servers.weights

    assert torch.equal(resumed(False), trained(form, 3, pushes))
    assert not torch.equal(resumed(True), trained(form, 3, pushes))


def test_a_plain_rule_keeps_nothing_for_workers_that_have_read():
    servers = Servers(torch.zeros(SIZE), 2, lambda: Descent(SGD.on_server))
    servers.read(0), servers.read(1)
    servers.push(1, torch.ones(SIZE))
    assert servers.stores[0].current == 0
    assert servers.stores[0].state()["read"] == []
