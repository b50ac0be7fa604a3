"""Simulated runs without servers: equivalences, conserved quantities, closed forms, and ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.config.errors import JobError
from hpcsync.core.assignments import decision_fields
from hpcsync.core.peer_coordinator import BatchDivision
from hpcsync.core.peer_machine import create_method
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.simulator.factory import simulation
from hpcsync.simulator.peer_run import PeerSimulation
from hpcsync.simulator.peer_transfers import build as build_workers
from hpcsync.simulator.simulate import prepare
from hpcsync.trace.schema import TABLES
from hpcsync.training.optimizers import LocalOptimizer
from hpcsync.training.sampler import batches
from hpcsync.workloads.registry import Workload, build
from tests.plain import on_samples, sequence, whole_batches
from tests.unit.jobs import LINEAR, make_job
from tests.unit.recorder import Recorder
from tests.unit.simulator.closed_forms import ring_allreduce_s
from tests.unit.simulator.running import TIMING, WITHOUT_SERVER, failed, simulate, timing_job

LR = 0.1
ALLREDUCE: dict[str, Any] = {"name": "allreduce"}
MODES = ["pull", "push", "push-sum", "permutation"]
NETWORK = {"bandwidth_gbit": 1e-3, "latency_us": 1000}  # 40 bytes take 0.32 ms, 4 kB 32 ms
NESTEROV = {"name": "sgd", "lr": LR, "momentum": 0.9, "nesterov": True}


def gossip(mode: str, **options: Any) -> dict[str, Any]:
    return {"name": "gossip", "mode": mode, **options}


def local(steps: int, **options: Any) -> dict[str, Any]:
    return {"name": "local-sgd", "steps": steps, **options}


EVERYTHING = [ALLREDUCE, local(1), local(4), *map(gossip, MODES)]


class Run:
    """A simulation of a job in float64; calls watch(run) after every iteration and before(run) before the first."""

    def __init__(
        self,
        paradigm: dict[str, Any],
        workers: int = 3,
        iterations: int = 10,
        *,
        watch: Callable[[Run], None] | None = None,
        before: Callable[[Run], None] | None = None,
        training: Workload | None = None,
        seconds: Any = 1.0,
        model: str = "constant",
        cluster: dict[str, Any] | None = None,
        **tables: Any,
    ) -> None:
        compute = {"compute": {"model": model, "seconds": seconds}}
        together = paradigm["name"] in ("allreduce", "bsp")
        self.job = make_job(
            **{
                "paradigm": paradigm,
                "optimizer": {"name": "sgd", "lr": LR},
                "stop": {"updates": iterations if together else iterations * workers},
                "cluster": {"workers": workers, **compute, **(cluster or {})},
                **tables,
            }
        )
        self.workload = training or build(self.job)
        self.trace = Recorder(decision_fields(self.job))
        self.simulation: Any = prepare(self.job, self.workload)(
            self.trace, lambda now_s, _: watch(self) if watch else None
        )
        if before:
            before(self)
        self.simulation.run()

    @property
    def weights(self) -> np.ndarray:
        """Final weights."""
        return next(self.workload.model.parameters()).detach().numpy().ravel().copy()

    def snapshots(self) -> np.ndarray:
        """Return the workers' weights as published now, shape (workers, size)."""
        return np.array([update.shown().numpy().copy() for update in self.simulation._numerics.updates])

    def iterations(self) -> list[int]:
        """Return every worker's latest iteration that has ended."""
        return self.simulation.coordinator.done

    def computed(self) -> list[int]:
        """Return every worker's latest iteration whose computation has ended."""
        return [worker.machine.iteration for worker in self.simulation._workers]


def start(**tables: Any) -> np.ndarray:
    return next(build(make_job(**tables)).model.parameters()).detach().numpy().ravel().copy()


def data(workers: int, worker: int, batch_size: int = 4):
    """Yield the worker's batches as NumPy arrays."""
    train = build(make_job()).train
    mine = batches(train, 1, worker, n_workers=workers, batch_size=batch_size, epochs=range(1000))
    return ((x.numpy(), y.numpy()) for x, y in mine)


def gradient(weights: np.ndarray, batch: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the gradient of half the mean squared error."""
    x, y = batch
    return x.T @ (x @ weights - y) / len(y)


def torch_sgd(iterations: int, workers: int = 1, worker: int = 0, batch_size: int = 4, **options: Any) -> np.ndarray:
    """Return the weights of a plain PyTorch loop."""
    workload = build(make_job())
    assert workload.loss is not None
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=LR, fused=True, **options)
    mine = batches(workload.train, 1, worker, n_workers=workers, batch_size=batch_size, epochs=range(1000))
    for batch in itertools.islice(mine, iterations):
        optimizer.zero_grad()
        workload.loss(workload.model, *batch).backward()
        optimizer.step()
    return next(workload.model.parameters()).detach().numpy().ravel().copy()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-12, atol=0))


# ---- equivalences ----


def test_all_reduce_is_one_process_with_a_larger_batch():
    assert close(Run(ALLREDUCE, workers=3, iterations=23).weights, torch_sgd(23, batch_size=12))
    assert not close(Run(ALLREDUCE, workers=3, iterations=23).weights, torch_sgd(24, batch_size=12))


@pytest.mark.parametrize("optimizer", [NESTEROV, {"name": "adam", "lr": LR}], ids=str)
def test_all_reduce_is_bsp(optimizer):
    a, b = (Run({"name": name}, 3, 20, optimizer=optimizer) for name in ("allreduce", "bsp"))
    assert close(a.weights, b.weights)  # the optimizer's rounding in the tail of a tensor depends on the CPU
    ours, servers = a.trace.array("updates"), b.trace.array("updates")
    assert close(ours["gradient_sq"], servers["gradient_sq"])  # likewise
    ours["gradient_sq"] = servers["gradient_sq"]
    assert ours.tobytes() == servers.tobytes()


@pytest.mark.parametrize("options", [{}, {"outer_lr": 1.0, "outer_momentum": 0.0}], ids=str)
def test_local_sgd_of_one_step_is_all_reduce(options):
    assert close(Run(local(1, **options), 3, 20).weights, Run(ALLREDUCE, 3, 20).weights)
    assert not close(Run(local(2, **options), 3, 20).weights, Run(ALLREDUCE, 3, 20).weights)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("paradigm", EVERYTHING, ids=str)
def test_one_worker_is_plain_sgd_bit_for_bit(paradigm, momentum):
    run = Run(paradigm, 1, 20, optimizer={"name": "sgd", "lr": LR, "momentum": momentum})
    assert np.array_equal(run.weights, torch_sgd(20, momentum=momentum))


@pytest.mark.parametrize("paradigm", [local(1000), *(gossip(mode, period=1000) for mode in MODES)], ids=str)
def test_without_an_exchange_workers_train_alone(paradigm):
    run = Run(paradigm, 3, 20)
    alone = [torch_sgd(n, 3, worker) for worker, n in enumerate(run.iterations())]
    assert close(run.weights, np.mean(alone, 0))
    assert all(np.array_equal(a, b) for a, b in zip(run.snapshots(), alone, strict=True))
    assert set(run.trace.array("exchanges")["peer"].tolist()) == {NO_PEER}
    assert run.trace.array("exchanges")["wire_bytes"].sum() == 0
    distance = np.sqrt(np.mean([np.sum((a - np.mean(alone, 0)) ** 2) for a in alone]))
    assert run.trace.array("evaluations")["consensus_distance"][-1] == pytest.approx(distance, rel=1e-9)


# ---- against NumPy ----


def exchanging(
    mode: str,
    iterations: int,
    workers: int,
    period: int = 1,
    mu: float = 0.9,
    beta: float = 0.5,
    last: dict[int, int] | None = None,
) -> np.ndarray:
    """Independent synchronous gossip with Nesterov momentum: all weights; `last`: iterations of leaving workers."""
    paradigm = gossip(mode, period=period, synchronous=True)
    peers = create_method(make_job(paradigm=paradigm, cluster={"workers": workers})).peers
    theta, w = np.array([start()] * workers), np.ones((workers, 1))
    v = np.zeros_like(theta)
    mine = [data(workers, worker) for worker in range(workers)]
    for iteration in range(1, iterations + 1):
        for worker in range(workers):
            if iteration <= (last or {}).get(worker, iterations):
                v[worker] = mu * v[worker] - LR * gradient(theta[worker] + mu * v[worker], next(mine[worker]))
                theta[worker] += v[worker]
        if iteration % period:
            continue
        round = iteration // period
        drawn = peers.permutation(round) if mode == "permutation" else [peers.drawn(i, round) for i in range(workers)]
        matrix = np.zeros((workers, workers))  # of the new weights, by the old ones
        for worker, peer in enumerate(drawn):
            if mode == "pull":
                matrix[worker, worker] += 1 - beta
                matrix[worker, peer] += beta
            elif mode == "permutation":
                matrix[peer, peer] += 1 - beta
                matrix[peer, worker] += beta
            elif mode == "push":
                matrix[worker, worker] += 1
                matrix[peer, worker] += 1
            else:
                matrix[worker, worker] += 0.5
                matrix[peer, worker] += 0.5
        if mode == "push":
            matrix /= matrix.sum(1, keepdims=True)
        theta, w = matrix @ (w * theta), matrix @ w if mode == "push-sum" else w
        theta /= w
    return theta


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mode", MODES)
def test_synchronous_gossip_matches_numpy(mode, workers):
    run = Run(gossip(mode, period=2, synchronous=True), workers, 17, optimizer=NESTEROV)
    expected = exchanging(mode, 17, workers, 2)
    assert close(run.snapshots(), expected)
    assert close(run.weights, expected.mean(0)) or mode == "push-sum"
    if workers > 2:
        assert not close(run.snapshots(), exchanging(mode, 17, workers, 3)), "the control: another period"
        assert len({worker.tobytes() for worker in run.snapshots()}) > 1


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize(("workers", "period", "beta"), [(2, 1, 0.5), (3, 1, 0.2), (5, 4, 0.5), (5, 4, 1.0)])
def test_permutation_gossip_matches_numpy(workers, period, beta, mu):
    optimizer = NESTEROV if mu else {"name": "sgd", "lr": LR}
    run = Run(gossip("permutation", period=period, beta=beta), workers, 17, optimizer=optimizer)
    expected = exchanging("permutation", 17, workers, period, mu, beta)
    assert close(run.snapshots(), expected)
    assert close(run.weights, expected.mean(0))


def test_publishing_the_look_ahead_gives_other_weights(monkeypatch):
    monkeypatch.setattr(LocalOptimizer, "_scale", lambda self: 0.0)
    run = Run(gossip("permutation"), 3, 17, optimizer=NESTEROV)
    assert not np.allclose(run.weights, exchanging("permutation", 17, 3).mean(0), rtol=1e-4)


def averaging(iterations: int, workers: int, steps: int, outer_lr: float, outer_mu: float, last=None) -> np.ndarray:
    """Independent local SGD with Nesterov momentum and DiLoCo's outer step."""
    theta = np.array([start()] * workers)
    v, outer, buffer = np.zeros_like(theta), start(), 0.0
    mine = [data(workers, worker) for worker in range(workers)]
    stepped: set[int] = set()
    for iteration in range(1, iterations + 1):
        for worker in range(workers):
            if iteration <= (last or {}).get(worker, iterations):
                v[worker] = 0.9 * v[worker] - LR * gradient(theta[worker] + 0.9 * v[worker], next(mine[worker]))
                theta[worker] += v[worker]
                stepped.add(worker)
        if iteration % steps == 0:
            d = outer - theta[sorted(stepped)].mean(0)
            buffer = outer_mu * buffer + d
            outer = outer - outer_lr * (d + outer_mu * buffer)
            theta[:] = outer
            stepped.clear()
    return theta


@pytest.mark.parametrize(("outer_lr", "outer_mu"), [(1.0, 0.0), (0.7, 0.9)])
@pytest.mark.parametrize("last", [{}, {1: 6}, {1: 8, 2: 11}], ids=str)
def test_local_sgd_matches_numpy(outer_lr, outer_mu, last):
    """A worker that leaves between averagings contributes its steps to the next one."""
    events = [{"worker": worker, "at_iteration": n + 1, "change": "leave"} for worker, n in last.items()]
    paradigm = local(4, outer_lr=outer_lr, outer_momentum=outer_mu)
    run = Run(paradigm, 3, 18, optimizer=NESTEROV, cluster={"events": events}, stop={"seconds": 17.5})
    assert max(run.iterations()) == 20
    expected = averaging(20, 3, 4, outer_lr, outer_mu, last)
    assert close(run.snapshots(), expected)
    assert close(run.weights, expected.mean(0))


def test_replicas_are_equal_right_after_an_averaging():
    equal: dict[int, list[bool]] = {}

    def watch(run: Run) -> None:
        iterations = set(run.computed())
        if len(iterations) == 1:
            shown = run.snapshots()
            equal.setdefault(iterations.pop(), []).append(bool((shown == shown[0]).all()))

    Run(local(3), 3, 9, watch=watch)
    assert {iteration for iteration, found in equal.items() if found[-1]} == {3, 6, 9}
    assert len(equal) == 9


@pytest.mark.parametrize(("mode", "exactly"), [("permutation", True), ("pull", False), ("push", False)])
def test_the_mean_moves_by_the_mean_gradient(mode, exactly):
    """Exactly with doubly stochastic mixing, and with other mixing only in expectation."""
    after: dict[int, np.ndarray] = {0: np.array([start()] * 4)}
    Run(gossip(mode), 4, 12, watch=lambda run: after.update({min(run.computed()): run.snapshots()}))
    mine = [data(4, worker) for worker in range(4)]
    moved = []
    for iteration in range(1, 13):
        steps = [LR * gradient(theta, next(own)) for theta, own in zip(after[iteration - 1], mine, strict=True)]
        expected = after[iteration - 1].mean(0) - np.mean(steps, 0)
        moved.append(np.allclose(after[iteration].mean(0), expected, rtol=1e-12))
    assert all(moved) == exactly


# ---- conserved quantities ----


class Counted:
    """Sums over all replicas, inboxes and models in transit of a simulated push gossip, after each of its events."""

    def __init__(self, simulation: Any) -> None:
        self.updates, self.inboxes = simulation._numerics.updates, simulation._inboxes
        self.under_way: list[Any] = []
        self.sums: list[np.ndarray] = []  # of x, before and after each mixing
        self.weights: list[float] = []
        for name in ("_computed", "_acknowledged", "_finish"):
            setattr(simulation, name, self._counting(getattr(simulation, name)))
        send, step, arrived = simulation._links.send, simulation._numerics.step, simulation._arrived

        def spied_send(source: int, target: int, then: Any, *args: Any) -> None:
            self.under_way.append(args[-1])
            send(source, target, then, *args)

        def spied_arrived(worker: int, peer: int, sent: Any) -> None:
            self.under_way = [other for other in self.under_way if other is not sent]
            arrived(worker, peer, sent)

        def spied_step(worker: int, lr: float) -> None:
            before = self.total()[0]
            step(worker, lr)
            self.sums[-1] = self.sums[-1] + self.total()[0] - before  # a step is no mixing

        simulation._links.send, simulation._numerics.step = spied_send, spied_step
        simulation._arrived = self._counting(spied_arrived)

    def total(self) -> tuple[np.ndarray, float]:
        held = [(update.shown().numpy() * update.weight, update.weight) for update in self.updates]
        held += [(inbox.total.numpy(), inbox.weight) for inbox in [*self.inboxes, *self.under_way] if inbox]
        return sum(x for x, _ in held), sum(weight for _, weight in held)

    def _counting(self, event: Any) -> Any:
        def counting(*args: Any) -> Any:
            self._count()
            result = event(*args)
            self._count()
            return result

        return counting

    def _count(self) -> None:
        x, weight = self.total()
        self.sums.append(x)
        self.weights.append(weight)

    def conserved(self) -> bool:
        return all(
            np.allclose(before, after, rtol=1e-12, atol=1e-14)
            for before, after in zip(self.sums[::2], self.sums[1::2], strict=True)
        )


def counted(mode: str, network: bool) -> tuple[Run, Counted]:
    found: list[Counted] = []
    cluster = {"network": NETWORK} if network else {}
    run = Run(
        gossip(mode), 4, 10, before=lambda run: found.append(Counted(run.simulation)),
        model="exponential", seconds=1e-3, cluster=cluster, optimizer=NESTEROV,
    )  # fmt: skip
    return run, found[0]


@pytest.mark.parametrize("network", [False, True])
def test_push_sum_loses_nothing(network):
    run, count = counted("push-sum", network)
    assert count.conserved() and len(count.sums) > 100
    assert set(count.weights) == {4.0}  # exact: sums of powers of two
    weights = [update.weight for update in count.updates]
    assert sum(weights) == 4.0
    assert len(set(weights)) > 1
    assert count.under_way == [] and not any(count.inboxes)
    latest = {row["worker"]: row["weight"] for row in run.trace.array("exchanges")}
    assert [latest[worker] for worker in range(4)] == weights


def test_a_plain_push_does_not_conserve():
    assert not counted("push", True)[1].conserved()


@pytest.mark.parametrize("events", [[], [{"worker": 1, "at_iteration": 5, "change": "leave"}]], ids=["", "leave"])
@pytest.mark.parametrize("workload", [LINEAR, TIMING], ids=["linear", "timing"])
@pytest.mark.parametrize("mode", ["push", "push-sum"])
def test_what_is_sent_is_received(mode, workload, events):
    cluster = {"network": NETWORK, "events": events}
    run = Run(gossip(mode), 4, 30, model="exponential", seconds=1e-3, cluster=cluster, workload=workload)
    rows = run.trace.array("exchanges")
    sent = rows[(rows["peer"] >= 0) & (rows["peer"] != rows["worker"])]
    to, received = Counter(sent["peer"].tolist()), Counter()
    for row in rows:
        received[int(row["worker"])] += int(row["n_received"])
    assert to == received
    assert len(sent) > 50
    late = rows[rows["batch_size"] == 0]
    assert len(late) > 0 and set(late["peer"].tolist()) == {NO_PEER} and late["n_received"].min() > 0
    assert late["now_s"].min() >= rows["now_s"].max() - 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_consensus_is_a_fixed_point(mode):
    workload = build(make_job())
    still = Workload(workload.model, lambda model, x, y: 0.0 * model(x).sum(), workload.train, workload.evaluate)
    run = Run(gossip(mode), 4, 20, training=still, optimizer=NESTEROV, model="lognormal")
    assert np.allclose(run.weights, start(), rtol=1e-14, atol=0)
    if mode in ("pull", "permutation"):
        assert np.array_equal(run.weights, start())
        assert run.trace.array("evaluations")["consensus_distance"][-1] == 0.0


# ---- reads ----


def test_a_pull_reads_the_last_published_replica():
    """Worker 0 is fast; worker 1 publishes its initial weights until its first round, and then those after its step."""
    seen: list[np.ndarray] = []
    shown: list[np.ndarray] = [start()]
    mixed: list[np.ndarray] = []

    def before(run: Run) -> None:
        fast, slow = run.simulation._numerics.updates
        mix_fast, mix_slow, step = fast.mix, slow.mix, run.simulation._numerics.step

        def spied_fast(model: torch.Tensor, beta: float) -> None:
            seen.append(model.numpy().copy())
            mix_fast(model, beta)

        def spied_slow(model: torch.Tensor, beta: float) -> None:
            mix_slow(model, beta)
            mixed.append(slow.shown().numpy().copy())

        def spied_step(worker: int, lr: float) -> None:
            step(worker, lr)
            if worker == 1:
                shown.append(slow.shown().numpy().copy())

        fast.mix, slow.mix, run.simulation._numerics.step = spied_fast, spied_slow, spied_step

    paradigm = gossip("pull", include_self=False)
    Run(paradigm, 2, before=before, seconds=[1.0, 3.4], stop={"seconds": 9.5}, optimizer=NESTEROV)
    expected = [shown[0]] * 3 + [shown[1]] * 3 + [shown[2]] * 4  # worker 1's rounds are at 3.4, 6.8 and 10.2
    assert len(seen) == 10
    assert all(np.array_equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert not np.array_equal(shown[1], mixed[0])


def test_rows_hold_the_peer():
    for paradigm in (ALLREDUCE, local(1)):
        rows = Run(paradigm, 3, 4).trace.array("exchanges")
        assert set(rows["peer"].tolist()) == {ALL_PEERS} and set(rows["n_received"].tolist()) == {2}
    for mode in MODES:
        run = Run(gossip(mode, period=2), 3, 12)
        rows = run.trace.array("exchanges")
        peers = create_method(run.job).peers
        for row in rows[rows["batch_size"] > 0]:
            worker, (round, rest) = int(row["worker"]), divmod(int(row["iteration"]), 2)
            drawn = NO_PEER
            if not rest:
                drawn = peers.permutation(round)[worker] if mode == "permutation" else peers.drawn(worker, round)
            assert row["peer"] == drawn
            assert row["wire_bytes"] == (0 if drawn in (NO_PEER, worker) else 40)
            if mode in ("pull", "permutation"):
                assert row["n_received"] == (0 if drawn in (NO_PEER, worker) else 1)


# ---- time ----


def ends(paradigm: dict[str, Any], workers: int = 2, **more: Any) -> np.ndarray:
    """Return the ends of each worker's iterations without arithmetic, shape (workers, 6)."""
    tables = {"workload": TIMING, "cluster": {"network": NETWORK}, **more}
    rows = Run(paradigm, workers, 6, **tables).trace.array("exchanges")
    rows = rows[(rows["batch_size"] > 0) & (rows["iteration"] <= 6)]
    return np.array([rows["now_s"][rows["worker"] == worker] for worker in range(workers)])


LATENCY_S, TRANSFER_S = 1e-3, 0.032


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_a_round_of_all_reduce(workers):
    seconds = [1.0 + 0.5 * worker for worker in range(workers)]
    round_s = seconds[-1] + ring_allreduce_s(workers, 4000, LATENCY_S, 125e3)
    expected = np.arange(1, 7) * round_s
    assert ends(ALLREDUCE, workers, seconds=seconds) == pytest.approx(np.array([expected] * workers), rel=1e-9)
    rows = Run(ALLREDUCE, workers, 6, seconds=seconds, cluster={"network": NETWORK}).trace.array("exchanges")
    waited = [rows["wait_s"][rows["worker"] == worker] for worker in range(workers)]
    assert waited == pytest.approx(np.array([[seconds[-1] - own] * 6 for own in seconds]), abs=1e-9)
    assert set(rows["wire_bytes"].tolist()) == {2 * (workers - 1) * 40 // workers}


@pytest.mark.parametrize("seconds", [0.01, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_all_reduce_overlaps_with_the_backward_pass_bucket_by_bucket(seconds, share):
    """Four buckets of 1000 bytes, of which the earlier ones are complete earlier; links or computations are slower."""
    compute = {"model": "constant", "seconds": seconds, "backward_share": share}
    found = ends(ALLREDUCE | {"bucket_mb": 1e-3}, 4, cluster={"compute": compute, "network": NETWORK})
    bucket_s = ring_allreduce_s(4, 1000, LATENCY_S, 125e3)
    early_s = [share * seconds * later / 4 for later in (3, 2, 1, 0)]  # before the end of the computation
    if share == 0.0:
        after_s = ring_allreduce_s(4, 4000, LATENCY_S, 125e3)  # at once, as one vector
    elif seconds * share / 4 > bucket_s:
        after_s = bucket_s  # of the last bucket alone
    else:
        after_s = 4 * bucket_s - early_s[0]
    expected = np.arange(1, 7) * (seconds + after_s)
    assert found == pytest.approx(np.array([expected] * 4), rel=1e-9)


def test_buckets_are_by_default_those_between_nodes():
    compute = {"model": "constant", "seconds": 0.02, "backward_share": 1.0}
    network = {"bandwidth_gbit": 10.0, "latency_us": 10.0}
    workload = {"name": "timing", "parameters": 6_000_000, "batch_size": 1}  # 24 MB
    found = [
        ends(ALLREDUCE | options, 4, workload=workload, cluster={"compute": compute, "network": network})
        for options in ({}, {"bucket_mb": 6.0}, {"bucket_mb": 25.0})
    ]
    assert np.array_equal(found[0], found[1])
    assert (found[0] < found[2]).all(), "one bucket, which begins after the backward pass"


@pytest.mark.parametrize(("share", "waited_s"), [(1.0, 0.0), (0.1, 0.0022)])
def test_a_worker_does_not_wait_for_others_while_a_bucket_is_under_way(share, waited_s):
    """The first worker ends at 20 ms; the second completes its first bucket at 6 or 22.2 ms, and each takes 10 ms."""
    compute = {"model": "constant", "seconds": [0.02, 0.024], "backward_share": share}
    cluster = {"compute": compute, "network": NETWORK}
    run = Run(ALLREDUCE | {"bucket_mb": 1e-3}, 2, 6, workload=TIMING, cluster=cluster)
    rows = run.trace.array("exchanges")
    first = rows[(rows["iteration"] == 1) & (rows["batch_size"] > 0)]
    assert first["wait_s"][np.argsort(first["worker"])] == pytest.approx([waited_s, 0.0], abs=1e-9)
    together = first["compute_s"] + first["wait_s"] + first["comm_s"]
    assert together == pytest.approx(first["now_s"] - first["begin_s"])


def test_no_exchange_takes_less_than_no_time():
    """Without a network, buckets take none. One of these rows had -1.4e-17 s."""
    compute = {"model": "exponential", "seconds": 0.02, "backward_share": 0.7}
    rows = Run(ALLREDUCE, 3, 300, workload=TIMING, cluster={"compute": compute}).trace.array("exchanges")
    assert (rows["comm_s"] >= 0.0).all() and (rows["wait_s"] >= 0.0).all()


def test_a_round_of_local_sgd():
    found = ends(local(3), 4)
    averaged = 3.0 + ring_allreduce_s(4, 4000, LATENCY_S, 125e3)
    expected = [1.0, 2.0, averaged, averaged + 1.0, averaged + 2.0, 2 * averaged]
    assert found == pytest.approx(np.array([expected] * 4), rel=1e-9)


@pytest.mark.parametrize(
    ("mode", "exchange_s"),
    [
        ("pull", 2 * LATENCY_S + TRANSFER_S),
        ("push", 2 * LATENCY_S + TRANSFER_S),
        ("push-sum", 2 * LATENCY_S + TRANSFER_S),
        ("permutation", LATENCY_S + TRANSFER_S),
    ],
)
def test_a_round_of_gossip(mode, exchange_s):
    expected = np.arange(1, 7) * (1.0 + exchange_s)
    found = ends(gossip(mode, include_self=False))
    assert found == pytest.approx(np.array([expected] * 2), rel=1e-9)


def test_links_are_shared():
    """A worker from which both others pull at once takes twice as long to answer."""
    run = Run(gossip("pull", include_self=False), 3, 20, workload=TIMING, cluster={"network": NETWORK})
    rows = run.trace.array("exchanges")
    first = rows[rows["iteration"] == 1]
    asked = Counter(first["peer"].tolist())
    assert sorted(asked.values()) == [1, 2]  # with this seed
    for row in first:
        assert row["comm_s"] == pytest.approx(2 * LATENCY_S + asked[int(row["peer"])] * TRANSFER_S, rel=1e-9)


def test_a_worker_that_draws_itself_exchanges_in_no_time():
    run = Run(gossip("pull"), 2, 20, cluster={"network": NETWORK})
    rows = run.trace.array("exchanges")
    itself = rows["peer"] == rows["worker"]
    assert 0 < itself.sum() < len(rows)
    assert set(rows["comm_s"][itself].tolist()) == {0.0}
    assert rows["comm_s"][~itself].min() > 2e-3


@pytest.mark.parametrize(
    ("paradigm", "counts"),
    [
        (ALLREDUCE, [10, 10, 10]),
        (local(2), [10, 10, 10]),
        (gossip("permutation"), [10, 10, 10]),
        (gossip("pull"), [40, 40, 10]),
        (gossip("push"), [40, 40, 10]),
        (gossip("push-sum"), [40, 40, 10]),
    ],
    ids=str,
)
def test_workers_blocked_by_a_straggler(paradigm, counts):
    rows = Run(paradigm, seconds=[1.0, 1.0, 4.0], stop={"seconds": 39.5}).trace.array("exchanges")
    rows = rows[rows["batch_size"] > 0]
    assert np.bincount(rows["worker"]).tolist() == counts
    assert (rows["wait_s"].max() > 0.0) == (len(set(counts)) == 1)


# ---- leaving, and ends ----


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_a_worker_that_has_left_keeps_exchanging_synchronously(mu):
    events = [{"worker": 1, "at_iteration": 5, "change": "leave"}]
    optimizer = NESTEROV if mu else {"name": "sgd", "lr": LR}
    run = Run(gossip("permutation"), 3, optimizer=optimizer, cluster={"events": events}, stop={"seconds": 11.5})
    assert run.iterations() == [12, 4, 12]
    assert close(run.snapshots(), exchanging("permutation", 12, 3, 1, mu, last={1: 4}))


def test_all_reduce_continues_with_the_remaining_workers():
    events = [{"worker": 1, "at_iteration": 4, "change": "leave"}]
    run = Run(ALLREDUCE, 3, 10, cluster={"events": events})
    updates, rows = run.trace.array("updates"), run.trace.array("exchanges")
    assert updates["n_contributions"].tolist() == [3] * 3 + [2] * 7
    assert rows["n_received"].tolist() == [2] * 9 + [1] * 14
    weights, mine = start(), [data(3, worker) for worker in range(3)]
    for iteration in range(1, 11):
        who = [0, 1, 2] if iteration < 4 else [0, 2]
        weights = weights - LR * np.mean([gradient(weights, next(mine[worker])) for worker in who], 0)
    assert close(run.weights, weights)


@pytest.mark.parametrize("paradigm", EVERYTHING, ids=str)
def test_all_may_leave(paradigm):
    events = [{"worker": worker, "at_iteration": 3 + worker, "change": "leave"} for worker in range(3)]
    run = Run(paradigm, 3, 1000, cluster={"events": events})
    assert run.iterations() == [2, 3, 4]
    assert sorted(run.trace.array("membership")["worker"].tolist()) == [0, 1, 2]
    assert run.trace.array("updates")["samples"][-1] == 4 * 9
    at_once = [{"worker": worker, "at_s": 0.0, "change": "leave"} for worker in range(3)]
    assert np.array_equal(Run(paradigm, 3, 9, cluster={"events": at_once}).weights, start())


@pytest.mark.parametrize("paradigm", EVERYTHING, ids=str)
@pytest.mark.parametrize("stop", [{"samples": 100}, {"updates": 20}, {"seconds": 7.2}], ids=str)
def test_a_run_ends_with_the_iteration_that_meets_the_stopping_rule(paradigm, stop):
    run = Run(paradigm, 3, seconds=[1.0, 1.1, 1.3], stop=stop)
    rows, updates = run.trace.array("exchanges"), run.trace.array("updates")
    in_step = paradigm["name"] != "gossip" or paradigm["mode"] == "permutation"
    assert not run.simulation.coordinator.active
    if in_step:
        assert len(set(run.iterations())) == 1
    last = rows[rows["batch_size"] > 0]["iteration"].max()
    if "samples" in stop:
        assert 100 <= updates["samples"][-1] <= 100 + 3 * 4
    elif "updates" in stop:
        assert 20 <= updates["version"][-1] <= 20 + 2
    else:
        period = paradigm.get("steps", 1)
        assert updates["now_s"][-1] - 7.2 < 1.3 * period + 1e-9
        assert last >= 5


def test_a_target_is_agreed_on_at_the_next_exchange():
    """Synchronous workers end one iteration after reaching it; asynchronous ones at the end of an iteration."""
    tables = {"stop": {"target_loss": 0.1}, "evaluation": {"every_samples": 12}}
    run = Run(ALLREDUCE, 3, **tables)
    losses = run.trace.array("evaluations")["loss"]
    reached = int(np.flatnonzero(losses <= 0.1)[0]) + 1
    assert run.iterations() == [reached + 1] * 3
    free = Run(gossip("pull"), 3, seconds=[1.0, 1.1, 1.3], **tables)
    evaluations = free.trace.array("evaluations")
    reached_s = evaluations["now_s"][evaluations["loss"] <= 0.1][0]
    assert free.trace.array("updates")["now_s"][-1] - reached_s <= 1.3


@pytest.mark.parametrize("paradigm", WITHOUT_SERVER, ids=str)
def test_evaluation_changes_nothing(paradigm):
    evaluated, alone = (
        Run(paradigm, 3, 30, optimizer=NESTEROV, model="lognormal", evaluation={"every_samples": every})
        for every in (20, 0)
    )
    assert len(evaluated.trace.array("evaluations")) > 5 > len(alone.trace.array("evaluations")) == 1
    assert np.array_equal(evaluated.weights, alone.weights)
    last = evaluated.trace.array("evaluations")[-1]
    assert (
        last["loss"]
        == alone.trace.array("evaluations")["loss"][0]
        == evaluated.workload.evaluate(alone.workload.model)[0]
    )
    assert last["version"] == evaluated.trace.array("updates")["version"][-1]
    distances = evaluated.trace.array("evaluations")["consensus_distance"]
    assert (distances == 0.0).all() if paradigm == ALLREDUCE else distances.max() > 0.0


@pytest.mark.parametrize("last", [{}, {1: 6}], ids=str)
def test_synchronous_workers_are_evaluated_at_an_exchange(last):
    """Once the slowest has finished the iteration; under local SGD before the mean is applied."""
    events = [{"worker": worker, "at_iteration": n + 1, "change": "leave"} for worker, n in last.items()]
    run = Run(
        local(4), 3, 16, seconds=[1.0, 1.0, 3.0], optimizer=NESTEROV, stop={"seconds": 47.5},
        evaluation={"every_samples": 12}, cluster={"events": events},
    )  # fmt: skip
    evaluations, updates = run.trace.array("evaluations")[:-1], run.trace.array("updates")
    assert evaluations["now_s"].tolist() == [12.0, 24.0, 36.0]
    made = [[12, 24, 36], [12, 22, 30]][bool(last)]
    assert evaluations["version"].tolist() == made
    assert (evaluations["samples"] == updates["samples"][np.array(made) - 1]).all()
    assert (evaluations["consensus_distance"] > 0.0).all()
    after = averaging(12, 3, 4, 1.0, 0.0, last)
    assert np.ptp(after, axis=0).max() == 0.0


# ---- allocated batches ----

BATCHES = {"policy": "equal-finish", "predictor": "last", "interval": 5, "total": 14}
SLOWER = [1.0, 2.0, 4.0]
CLUSTERS = {
    "": {},
    "network": {"network": NETWORK},
    "events": {
        "network": NETWORK,
        "events": [
            {"worker": 0, "at_iteration": 4, "change": "slow", "factor": 5.0},
            {"worker": 0, "at_iteration": 6, "change": "recover"},
            {"worker": 1, "at_s": 5.5, "change": "leave"},
        ],
    },
}


def sharing(iterations: int = 20, seconds: Any = SLOWER, leave: dict[int, int] | None = None, **tables: Any) -> Run:
    """Run with allocated batches; `leave`: worker -> iteration in place of which it leaves."""
    events = [{"worker": worker, "at_iteration": at, "change": "leave"} for worker, at in (leave or {}).items()]
    cluster = {"events": events, **tables.pop("cluster", {})}
    return Run(ALLREDUCE, len(seconds), iterations, seconds=seconds, cluster=cluster, **{"batches": BATCHES, **tables})


def batch_sizes(run: Run) -> np.ndarray:
    """Return the batch sizes, shape (iterations, workers); 0 after a worker has left."""
    rows = run.trace.array("exchanges")
    found = np.zeros((rows["iteration"].max(), run.job.cluster.workers), int)
    found[rows["iteration"] - 1, rows["worker"]] = rows["batch_size"]
    return found


def test_a_slow_worker_gets_small_batches_and_the_others_stop_waiting():
    for policy in ("proportional", "equal-finish"):
        run = sharing(batches={**BATCHES, "policy": policy})
        assert batch_sizes(run).tolist() == [[5, 5, 4]] * 5 + [[8, 4, 2]] * 15
        rows = run.trace.array("exchanges")
        before, after = rows[rows["iteration"] <= 5], rows[rows["iteration"] > 5]
        assert before["wait_s"].sum() / 5 > 3.0
        assert after["wait_s"].max() < 1e-9
        assert (after["compute_s"] == 2.0).all()  # of 4 samples, the job's batch, in seconds x 8/4, 4/4, 2/4
    decisions = run.trace.array("decisions")
    assert decisions["chosen"].tolist() == [8.0, 4.0, 2.0]
    assert decisions["iteration"].tolist() == [5.0] * 3
    assert decisions["batch_before"].tolist() == [5.0, 5.0, 4.0]


def test_the_fixed_time_is_separated_from_the_time_per_sample():
    """Half of 2 s is fixed; the transfer takes equally long for all."""
    seconds = [1.0, 1.0, 2.0]
    cluster = {"compute": {"model": "constant", "seconds": seconds, "fixed_share": 0.5}, "network": NETWORK}
    run = sharing(60, seconds, cluster=cluster, batches={**BATCHES, "total": 40, "gain": 0.0}, stop={"updates": 60})
    proportional = sharing(
        60, seconds, cluster=cluster, batches={**BATCHES, "total": 40, "gain": 0.0, "policy": "proportional"}
    )
    # 0.5 + n / 8 = 1 + m / 4, and 2 n + m = 40
    assert batch_sizes(run)[-1].tolist() == [17, 17, 6]
    assert run.trace.array("decisions")["fixed_s"].max() > 0.4
    assert (proportional.trace.array("decisions")["fixed_s"] == 0.0).all()


@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": LR}, NESTEROV], ids=["plain", "nesterov"])
def test_any_split_is_the_whole_batch(optimizer, monkeypatch):
    run = sharing(30, optimizer=optimizer, seconds=[1.0, 2.0, 4.0, 8.0])
    sizes = batch_sizes(run)
    assert (sizes.sum(1) == 14).all() and len(set(map(tuple, sizes.tolist()))) > 1
    assert np.ptp(sizes[-1]) > 4
    steps = whole_batches(run.job, 30)
    whole = on_samples(run.job, steps)
    assert close(run.weights, whole)
    counts = np.bincount(sequence(run.job, np.concatenate(steps), 60))  # 420 samples, 7 training epochs of 60
    assert set(counts.tolist()) == {7}
    monkeypatch.setattr(BatchDivision, "weight", lambda self, worker: 1.0)
    unweighted = sharing(30, optimizer=optimizer, seconds=[1.0, 2.0, 4.0, 8.0])
    assert (batch_sizes(unweighted) == sizes).all()
    assert not np.allclose(unweighted.weights, whole, rtol=1e-6)


def test_the_mean_is_over_samples_after_a_worker_has_left(monkeypatch):
    """The samples of worker 1 in iteration 8 are left out; from then on the others take all."""
    leave = {1: 8}
    run = sharing(20, leave=leave)
    sizes, steps, first = batch_sizes(run), [], 0
    assert sizes[7].tolist() == [8, 0, 2] and sizes[8].tolist() == [11, 0, 3]
    for iteration in range(1, 21):
        numbers = np.arange(first, first + 14)
        steps.append(numbers if iteration != 8 else np.append(numbers[:8], numbers[12:]))
        first += 14
    expected = on_samples(run.job, steps)
    assert close(run.weights, expected)
    assert run.trace.array("updates")["samples"].tolist() == [14 * n - 4 * (n >= 8) for n in range(1, 21)]
    monkeypatch.setattr(BatchDivision, "correction", lambda self, n_contributing, n_samples: 1.0)
    assert not np.allclose(sharing(20, leave=leave).weights, expected, rtol=1e-6)


def test_equal_sizes_give_the_bits_of_unallocated_batches():
    """Workers are equally fast; a training epoch has whole batches, so the data order is the same."""
    run = sharing(12, [1.0, 1.0], batches={**BATCHES, "total": 8}, workload={**LINEAR, "samples": 64})
    plain = sharing(12, [1.0, 1.0], batches={"policy": "equal"}, workload={**LINEAR, "samples": 64})
    assert len(run.trace.array("decisions")) == 0
    for table in ("exchanges", "updates"):
        assert run.trace.array(table).tobytes() == plain.trace.array(table).tobytes()
    assert run.weights.tobytes() == plain.weights.tobytes()


@pytest.mark.parametrize("stop", [{"samples": 100}, {"samples": 98}, {"updates": 7}, {"seconds": 22.0}], ids=str)
def test_ends_and_evaluations_count_samples(stop):
    run = sharing(stop=stop, evaluation={"every_samples": 30}, leave={0: 6})
    updates, evaluations = run.trace.array("updates"), run.trace.array("evaluations")
    if "samples" in stop:
        assert updates["samples"][-2] < stop["samples"] <= updates["samples"][-1]
    made = evaluations["version"][:-1]
    assert (evaluations["samples"] == updates["samples"][evaluations["version"] - 1]).all()
    assert (np.diff(evaluations["samples"][:-1] // 30) >= 1).all() and len(made) >= 2
    assert set(run.iterations()[1:]) == {len(updates)}


@pytest.mark.parametrize(
    ("predictor", "leave"), [("last", {}), ("smoothing", {}), ("smoothing", {2: 31}), ("blend", {2: 31})], ids=str
)
def test_sizes_follow_from_the_seed(predictor, leave, tmp_path):
    def tables(seed: int) -> tuple[list[bytes], bytes]:
        run = sharing(
            60, seed=seed, model="lognormal", leave=leave, batches={**BATCHES, "predictor": predictor},
            cluster={"network": NETWORK},
        )  # fmt: skip
        return [run.trace.array(table).tobytes() for table in TABLES], run.weights.tobytes()

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("policy", ["proportional", "equal-finish"])
def test_a_simulated_trace_of_sizes_audits(tmp_path, policy, workers, cluster):
    if workers == 1 and "events" in cluster:
        cluster = cluster | {"events": cluster["events"][:2]}
    job = timing_job(
        workers=workers, model="lognormal", paradigm=ALLREDUCE, stop={"updates": 60}, cluster=cluster,
        batches={"policy": policy, "predictor": "smoothing", "interval": 4},
        seconds=[1.0 + worker for worker in range(workers)],
    )  # fmt: skip
    trace = simulate(job, tmp_path / "trace.h5")
    assert failed(trace) == []
    assert trace.finished
    assert (len(trace.tables["decisions"]) > 0) == (workers > 1)
    assert trace.tables["decisions"].dtype.names[-5:] == tuple(decision_fields(job))


# ---- whole runs ----


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("paradigm", WITHOUT_SERVER, ids=str)
def test_the_same_job_gives_the_same_bytes(paradigm, cluster):
    def tables(seed: int) -> tuple[list[bytes], bytes]:
        run = Run(paradigm, 3, 15, seed=seed, model="lognormal", cluster=cluster, optimizer=NESTEROV)
        return [run.trace.array(table).tobytes() for table in TABLES], run.weights.tobytes()

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("paradigm", WITHOUT_SERVER, ids=str)
def test_a_simulated_trace_audits(tmp_path, paradigm, workers, cluster):
    if workers == 1 and "events" in cluster:
        cluster = cluster | {"events": cluster["events"][:2]}
    job = timing_job(workers=workers, model="lognormal", paradigm=paradigm, stop={"updates": 60}, cluster=cluster)
    trace = simulate(job, tmp_path / "trace.h5")
    assert failed(trace) == []
    assert trace.finished
    assert len(trace.tables["membership"]) == workers


@pytest.mark.parametrize("workload", [LINEAR, TIMING], ids=["linear", "timing"])
def test_push_sum_keeps_enough_weight_without_returns(workload):
    """Worker 1 has left; worker 0 sends it half of its weight repeatedly, but never all of it."""
    events = [{"worker": 1, "at_iteration": 3, "change": "leave"}]
    paradigm = gossip("push-sum", include_self=False)
    run = Run(paradigm, 2, 200, cluster={"events": events}, workload=workload)
    rows = run.trace.array("exchanges")
    own = rows[(rows["worker"] == 0) & (rows["batch_size"] > 0)]
    assert 2.0**-32 < own["weight"].min() < 2.0**-30
    assert set(own["peer"][-100:].tolist()) == {0}
    if workload is LINEAR:
        optimum = np.linalg.lstsq(*(tensor.numpy() for tensor in run.workload.train.tensors))[0]
        assert np.linalg.norm(run.snapshots()[0] - optimum) < 0.1


# ---- refused jobs ----


@pytest.mark.parametrize(
    ("paradigm", "cluster", "message"),
    [
        (ALLREDUCE, {"workers": 2}, "cluster.compute: missing"),
        (
            gossip("push"),
            {"workers": 2, "compute": {"model": "constant", "seconds": [1.0, 0.0]}},
            "cluster.compute: worker 1's iterations take 0 seconds",
        ),
        (
            ALLREDUCE,
            {"workers": 1, "compute": {"model": "constant", "seconds": 0.0}, "network": {}},
            "cluster.compute: worker 0's iterations take 0 seconds",
        ),
        (  # once worker 1 has left
            ALLREDUCE,
            {
                "workers": 2,
                "compute": {"model": "constant", "seconds": [0.0, 1.0]},
                "events": [{"worker": 1, "change": "leave", "at_s": 0.5}],
            },
            "cluster.compute: worker 0's iterations take 0 seconds",
        ),
        (  # a passive worker, which transfers nothing itself
            {"name": "ad-psgd"},
            {"workers": 2, "compute": {"model": "constant", "seconds": [1.0, 0.0]}, "network": {}},
            "cluster.compute: worker 1's iterations take 0 seconds: to be simulated such a job must have stop.samples",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_simulated(paradigm, cluster, message):
    job = make_job(paradigm=paradigm, cluster=cluster, stop={"seconds": 1.0})
    with pytest.raises(JobError, match=f"^{message}"):
        build_workers(job, build(job))


def test_an_active_worker_whose_iterations_take_no_time_waits_for_its_transfers():
    compute = {"model": "constant", "seconds": [0.0, 1.0]}
    cluster = {"workers": 2, "compute": compute, "network": {"latency_us": 1e5}}
    job = make_job(paradigm={"name": "ad-psgd"}, cluster=cluster, stop={"seconds": 3.5})
    build_workers(job, build(job))


@pytest.mark.parametrize("paradigm", [ALLREDUCE, local(2), gossip("permutation")], ids=str)
def test_synchronous_time_advances_if_one_worker_takes_time(paradigm):
    run = Run(paradigm, 2, seconds=[1.0, 0.0], stop={"seconds": 3.5})
    assert run.iterations() == [4, 4]


def test_a_run_without_events_left_fails():
    job = timing_job(paradigm=ALLREDUCE)
    workload = build(job)
    stuck: PeerSimulation = simulation(job, workload, build_workers(job, workload), Recorder())
    stuck._exchange_all = lambda agreed: None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"workers \[0, 1\] are blocked forever"):
        stuck.run()


@pytest.mark.parametrize("paradigm", [ALLREDUCE, {"name": "gossip", "mode": "pull", "include_self": False}])
def test_a_step_takes_the_time_of_its_bytes(paradigm):
    """4000 bytes at 1 MB/s, after every iteration, before the next one; the control is that updates take no time."""
    (without, *_), (found, *_) = (
        ends(paradigm, 2, cluster={"network": NETWORK, "update_gbytes_per_s": speed}) for speed in (None, 1e-3)
    )
    assert found == pytest.approx(without + 4e-3 * np.arange(6), rel=1e-9)
