"""Every object with declared state, saved and restored at random moments: from there it behaves as the original.

Negative control: a declaration from which one attribute is left out is noticed, for every attribute that has changed.
"""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcsync.compression import CODECS, TensorLayout
from hpcsync.compression import create as create_codec
from hpcsync.compression.codec import Draws
from hpcsync.config.job import Job, Stop
from hpcsync.core.coordinator import Coordinator, coordinate
from hpcsync.core.device_speed import device
from hpcsync.core.iterations import Iterations
from hpcsync.core.peer_coordinator import BatchDivision, Lockstep, PeerCoordinator, StepInfo
from hpcsync.core.peer_machine import PeerMachine, create_method
from hpcsync.core.session import Asked
from hpcsync.core.straggler_detector import StragglerDetector
from hpcsync.core.worker_machine import WorkerMachine
from hpcsync.paradigms import create
from hpcsync.paradigms.events import Evaluated, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.peer_method import Agreed, ExchangeResult, Transport
from hpcsync.planning.batch_allocation import Allocator, Estimate
from hpcsync.planning.commit_rate_search import Search
from hpcsync.planning.k_controller import KController
from hpcsync.planning.speed_estimator import Estimator
from hpcsync.run_dir.checkpoint_files import read_part, write_part
from hpcsync.state import StateError, Stateful
from hpcsync.training import rng_state
from hpcsync.training.compressor import Compressor
from hpcsync.training.contributions import Change, Position
from hpcsync.training.flat_model import FlatModel
from hpcsync.training.local_update import NullPeer, Outer, Peer
from hpcsync.training.lr_schedule import EvaluationSchedule
from hpcsync.training.optimizers import ELEMENTWISE, LocalOptimizer, OptimizerSpec
from hpcsync.training.parameter_store import Store, row_size
from hpcsync.training.piece_optimizer import PieceOptimizer
from hpcsync.training.script_optimizers import OwnOptimizer, ScriptOptimizers
from hpcsync.training.speed_models import predictor
from hpcsync.training.update_rules import Commit, DelayCompensated, DelayedNesterov, Descent, Elastic
from tests.counting import CountingAdam
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder

N = 4  # workers
LAYOUT = TensorLayout([(12, 10), (10,), (6, 4)])
SHAPES = LAYOUT.shapes

Play = Callable[[Any, random.Random, int], list[Any]]
Case = tuple[Callable[[], Stateful], Play]


# ---- what happens to them ----


def play_paradigm(paradigm: Any, dice: random.Random, steps: int) -> list[Any]:
    answers = []
    now_s = max(paradigm._now_s, 0.0)
    for _ in range(steps):
        now_s += dice.choice([0.0, 0.5, dice.random()])
        active = paradigm._progress.active
        computing = sorted(active - paradigm._blocked_since_s.keys())
        away = sorted(set(range(N)) - active)
        if paradigm.wants_evaluation and (not computing or dice.random() < 0.3):
            event: Any = Evaluated(now_s, min(active), dice.random(), paradigm._version - dice.randrange(2), now_s)
        elif away and dice.random() < 0.3:
            event = Joined(now_s, dice.choice(away))
        elif len(computing) > 1 and dice.random() < 0.05:
            event = Left(now_s, dice.choice(computing))
        else:
            event = push_info(now_s, dice.choice(computing), dice)
        answers.append(paradigm.handle(event))
        paradigm.check()
    return answers


def push_info(now_s: float, worker: int, dice: random.Random) -> PushInfo:
    times = {name: dice.random() for name in ("compute_s", "wait_s", "pull_s", "encode_s", "comm_s")}
    expected = {"predicted_fixed_s": dice.random(), "predicted_sample_s": 0.1 + dice.random()}
    return PushInfo(now_s, worker, loss=dice.random(), batch_size=4, local_steps=1, **times, **expected)


def play_coordinator(coordinator: Any, dice: random.Random, steps: int) -> list[Any]:
    commands, rows = [], coordinator._trace.rows
    begin, now_s = len(rows), coordinator._now_s
    for _ in range(steps):
        now_s += dice.random()
        away = sorted(set(range(N)) - coordinator.active)
        computing = sorted(coordinator.computing)
        if coordinator.wants_evaluation and not computing:
            commands.append(coordinator.evaluated(now_s, coordinator.version, 2, dice.random(), dice.random()))
            continue
        if not computing:
            break  # the run is over
        if away and dice.random() < 0.3:
            commands.append(coordinator.joined(now_s, dice.choice(away)))
        elif len(computing) > 1 and dice.random() < 0.05:
            commands.append(coordinator.left(now_s, dice.choice(computing)))
        elif dice.random() < 0.1:
            commands.append(coordinator.evaluated(now_s, 1, 2, dice.random(), dice.random()))
        else:
            commands.append(coordinator.pushed(now_s, push_info(now_s, dice.choice(computing), dice)))
        coordinator.check()
        commands.append(coordinator.stalls.look(now_s))
    return [commands, rows[begin:], coordinator.stalls.deadline_s(0)]


def play_peers(coordinator: Any, dice: random.Random, steps: int) -> list[Any]:
    rows = coordinator._trace.rows
    begin, now_s = len(rows), coordinator.updated_s
    for _ in range(steps):
        now_s += dice.random()
        slowest = min(coordinator.done[w] for w in coordinator.active)
        worker = dice.choice([w for w in sorted(coordinator.active) if coordinator.done[w] <= slowest])
        info = dict.fromkeys(StepInfo._fields, 1.0) | {"worker": worker, "iteration": coordinator.done[worker] + 1}
        info |= {"peer": 0, "batch_size": 4, "wire_bytes": 8, "loss": dice.random(), "wait_s": 0.1, "n_received": 1}
        info |= {"problem": 0}
        coordinator.exchanged(now_s, StepInfo(**info))
        if dice.random() < 0.1:
            coordinator.evaluated(now_s, 1, 2, dice.random(), dice.random(), 0.0)
        if len(coordinator.active) > 2 and dice.random() < 0.02:
            coordinator.left(now_s, max(coordinator.active))
    return rows[begin:]


def play_allocator(allocator: Any, dice: random.Random, steps: int) -> list[Any]:
    answers: list[Any] = []
    for _ in range(steps):
        active = allocator._active
        away = sorted(set(range(N)) - set(active))
        if away and dice.random() < 0.3:
            answers.append(allocator.joined(dice.choice(away)))
        elif len(active) > 1 and dice.random() < 0.05:
            answers.append(allocator.left(dice.choice(active)))
        else:
            worker = dice.choice(active)
            answers.append(allocator.pushed(worker, Estimate(dice.random(), 0.1 + dice.random())))
            answers.append(allocator.allocate_next(worker))
        allocator.check()
    return answers


def play_division(division: Any, dice: random.Random, steps: int) -> list[Any]:
    gone = range(N - 1 if N - 1 not in division._active or dice.random() < 0.3 else N, N)

    def gather() -> list[Estimate | None]:
        return [None if w in gone else Estimate(dice.random(), 0.1 + dice.random()) for w in range(N)]

    return [(division.exchanged(N - len(gone), gather), division.work(1), division.weight(0)) for _ in range(steps)]


def play_controller(controller: Any, dice: random.Random, steps: int) -> list[Any]:
    answers = []
    for _ in range(steps):
        controller.pushed(dice.randrange(N), dice.random(), dice.random())
        answers.append((controller.updated(20, [dice.randrange(20) for _ in range(N)], range(N)), controller.k))
    return answers


def play_detector(detector: Any, dice: random.Random, steps: int) -> list[Any]:
    answers: list[Any] = []
    now_s = detector._looked_s
    for _ in range(steps):
        now_s += 0.5
        for worker in range(2):  # some iterations take much longer than usual
            running = detector._running.get(worker)
            if running is None:
                detector.began(worker, int(now_s), now_s)
            elif now_s - running.since_s >= (6.0 if running.number % 7 == worker else 0.5):
                detector.ended(worker, now_s, 0.01)
        if dice.random() < 0.6:
            answers.append(detector.look(now_s, {0} if dice.random() < 0.1 else ()))
        answers.append(detector.deadline_s(1))
    for n_looks in [0] * 8 + [20]:  # a usual iteration, eight times, and one that was reported and is over
        detector.began(2, steps, now_s)
        answers += [detector.look(now_s := now_s + 0.5) for _ in range(n_looks)]
        detector.ended(2, now_s := now_s + 0.2)
    return answers


def play_device(it: Any, dice: random.Random, steps: int) -> list[Any]:
    answers = []
    for i in range(steps):
        now_s = float(it._iteration + i)
        if it.leaves(now_s) and dice.random() < 0.05:
            it.join()
        if it.joins_s == math.inf:
            answers.append(it.seconds(now_s))
    return answers


def clock() -> Iterator[float]:
    """Yield times of which all differences are exact: the steps of a network take longer than the first two."""
    yield from (i * 2.0**-9 for i in range(4))
    yield from itertools.count(1.0, 2.0**-8)


class Stream:
    """Batches whose number only reading tells."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(14).reshape(7, 2)


def play_iterations(it: Any, dice: random.Random, steps: int) -> list[Any]:
    it.loop = getattr(it, "loop", None) or it.shard(Asked(range(50), 4, 1_000))
    return play_loop(it, steps)


def play_stream(it: Any, dice: random.Random, steps: int) -> list[Any]:
    it.loop = getattr(it, "loop", None) or it.shard(Asked(Stream(), None, None))
    return play_loop(it, steps)


def play_loop(it: Any, steps: int) -> list[Any]:
    answers = []
    for _ in range(steps):
        answers.append(next(it.loop))
        it.end()
    return answers


def play_codec(codec: Any, dice: random.Random, steps: int) -> list[Any]:
    payloads = []
    for _ in range(steps):
        vector = np.random.default_rng(dice.randrange(1 << 30)).standard_normal(LAYOUT.size).astype(np.float32)
        if codec.averages:  # both ways of a codec that averages keep the same state
            left = codec.left_factors(vector)
            codec.product(codec.right_factors(left), vector)
            payloads.append(vector.tobytes())
        else:
            payloads.append(codec.encode(vector).payload(0, LAYOUT.size).tobytes())
    return payloads


def play_compressor(compressor: Any, dice: random.Random, steps: int) -> list[Any]:
    return play_codec(compressor.codec, dice, steps)


def play_estimator(estimator: Any, dice: random.Random, steps: int) -> list[Any]:
    return [estimator.observe(dice.randrange(1, 50), 0.1 + dice.random(), dice.random()) for _ in range(steps)]


def play_machine(machine: Any, dice: random.Random, steps: int) -> list[Any]:
    answers, now_s = [], 0.0
    for _ in range(steps):
        machine.waits(now_s)
        machine.granted(Grant(0, machine.grant.iteration + 1, machine.grant.version + 2, local_steps=2, batch_size=8))
        machine.read(now_s + 0.1, now_s := now_s + 0.2)
        pushes = False
        while not pushes:
            pushes = machine.computed(now_s, now_s := now_s + dice.random(), dice.randrange(1, 9))
        answers.append(machine.delivered(dice.random(), 0.0, dice.random(), 8))
    return answers


class Sums(Transport):
    """An all-reduce whose results are drawn."""

    def __init__(self) -> None:
        self.dice = random.Random(0)
        self.calls: list[Any] = []

    def sum(self, worker: int, counts: Any, lr: float) -> Any:
        self.calls.append((counts, lr))
        return Agreed(N, N, self.dice.randrange(9), False, False), ExchangeResult()

    def publish_for_evaluation(self, worker: int, serial: int) -> None:
        self.calls.append(serial)


def play_peer_machine(machine: Any, dice: random.Random, steps: int) -> list[Any]:
    """Iterations of all-reduce, whose waits end at once."""
    machine.transport = Sums()
    machine.transport.dice = dice
    answers = []
    for _ in range(steps):
        iteration, result = machine.advance(dice.randrange(1, 9), stop=False), None
        with suppress(StopIteration):
            while True:
                result = iteration.send(result)
        answers.append((machine.serial, machine.stopped))
    return [*answers, *machine.transport.calls]


def play_contribution(it: Any, dice: random.Random, steps: int) -> list[Any]:
    """Answers to pushes, then local steps and the next push."""
    answers = []
    for _ in range(steps):
        it.adopt(drawn(dice))
        answers.append(it.weights.clone())
        for last in (False, True):
            it.step(drawn(dice), dice.randrange(1, 9), dice.random(), last=last)
        answers.append((it.prepare(), it.vector.clone()))
    return answers


def play_vectors(it: Any, dice: random.Random, steps: int) -> list[Any]:
    """Steps of a local, an outer or a peer's optimizer."""
    answers = []
    for _ in range(steps):
        gradient = drawn(dice)
        if isinstance(it, Outer):
            it.step(gradient)
            answers.append(gradient.clone())
        elif isinstance(it, Peer):
            it.step(gradient, 0.1)
            it.weight *= 0.9
            answers.append(it.shown().clone())
        else:
            it.step(gradient, dice.random())
            answers.append(it.without_look_ahead().clone())
    return answers


def script() -> ScriptOptimizers:
    """Two optimizers, one with two groups, for 20 elements."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    model.extra = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [model.weight]}, {"params": [model.extra], "lr": 0.3}]
    optimizers = [torch.optim.SGD(groups, 0.1, 0.9, nesterov=True), CountingAdam([model.bias], 0.1)]
    return ScriptOptimizers(optimizers, FlatModel(model, list(model.parameters())))


def play_script(own: Any, dice: random.Random, steps: int) -> list[Any]:
    answers, made = [], own._script
    for _ in range(steps):
        made.flat.gradient.copy_(torch.cat([drawn(dice), torch.ones(4)]))
        made.flat.return_gradient([True] * 3)
        made.stepping = dice.randrange(2)
        made.optimizers[0].param_groups[1]["lr"] = dice.random()
        own.step(made.flat.gradient, dice.random())
        answers.append(own.without_look_ahead().clone())
    return answers


def script_store() -> Store:
    made = script()
    store = make_store(Descent(lambda weights: PieceOptimizer(made, weights, slice(2, 22))))
    store._stated = np.zeros((2, made.n_stated))
    store.made = made
    return store


def play_script_store(store: Any, dice: random.Random, steps: int) -> list[Any]:
    made = store.made
    if steps > 40:
        store._rule.set_momentum(dice.random())
    stepping = dice.randrange(2)
    for worker in range(2):
        made.optimizers[0].param_groups[1]["lr"] = dice.random()
        store._stated[worker] = made.statement()
        store._stated[worker, -3:] = [owner == stepping for owner in made.owner]
    return play_store(store, dice, steps)


def play_store(store: Any, dice: random.Random, steps: int) -> list[Any]:
    answers = []
    for _ in range(steps):
        for worker in range(2):
            store._slots[worker].copy_(torch.nn.functional.pad(drawn(dice), (0, row_size(20) - 20)))
        store.accumulate(0, dice.random())
        if dice.random() < 0.7:
            store.apply([1], 0.1, [dice.random()], 2.0)
        answers.append((store.version, store.weights.clone()))
    return answers


def play_read_store(store: Any, dice: random.Random, steps: int) -> list[Any]:
    """Updates by workers that have read a version before."""
    answers = []
    for _ in range(steps):
        worker = dice.randrange(2)
        store.pin(worker)
        store._slots[worker].copy_(torch.nn.functional.pad(drawn(dice), (0, row_size(20) - 20)))
        store.apply([worker], 0.1, [1.0], 1.0)
        answers.append((store.version, store.weights.clone()))
    return answers


def drawn(dice: random.Random) -> torch.Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(dice.randrange(1 << 30)))


# ---- the objects ----


def job(paradigm: dict[str, Any], **tables: Any) -> Job:
    return make_job(paradigm=paradigm, cluster={"workers": N}, stop={"updates": 10_000}, **tables)


PARADIGMS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "asp": {},
    "ssp": {"staleness": 2},
    "dssp": {"staleness_min": 1, "staleness_max": 4},
    "easgd": {"synchronous": True},
    "k-sync": {"k": "state", "cancel": "abort"},
    "k-batch-sync": {"k": 3},
    "k-async": {"k": "min"},
    "k-batch-async": {"k": "loss"},
    "ashl": {"warmup": 1, "profiled": 2, "loss_preset": 0.5},
    "adsp": {"check_period_s": 2.0, "interval_min_s": 0.2, "search_every_s": 5.0},
    "async-diloco": {"quorum": 2, "grace_s": 0.5},
}
EVALUATED = {**PARADIGMS["adsp"], "loss": "evaluation"}
ALLOCATED = {"policy": "equal-finish", "predictor": "last", "interval": 2, "total": 9 * N + 1, "gain": 0.0}
SLOW = [{"worker": 0, "at_s": at_s, "change": "slow", "factor": factor} for at_s, factor in ((5, 2.0), (12, 5.0))]
AWAY = [
    {"worker": 0, "at_iteration": 20, "change": "slow", "factor": 2.0},
    {"worker": 0, "at_s": 30, "change": "leave"},
    {"worker": 0, "at_s": 60, "change": "join"},
]


def make_store(rule: Any) -> Store:
    buffers = torch.zeros(3, row_size(20))
    buffers[0, :20] = torch.arange(20.0)
    return Store(buffers, torch.zeros(2, row_size(20)), np.zeros(3, np.int64), rule, 20)


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, options in PARADIGMS.items():
        found[f"paradigm {name}"] = lambda n=name, o=options: create(n, N, **o), play_paradigm
        this = job({"name": name, **({"period": 2} if name == "easgd" else {}), **options})
        found[f"coordinator {name}"] = lambda j=this: coordinate(j, Recorder()), play_coordinator
    found["paradigm adsp by evaluations"] = lambda: create("adsp", N, **EVALUATED), play_paradigm
    evaluated_adsp = job({"name": "adsp", **EVALUATED})
    found["coordinator adsp by evaluations"] = lambda: coordinate(evaluated_adsp, Recorder()), play_coordinator
    gate = {**PARADIGMS["ashl"], "staleness": 0, "commit": "after-gate"}
    found["paradigm ashl after the gate"] = lambda: create("ashl", N, **gate), play_paradigm
    behind = job({"name": "ashl", **gate})
    found["coordinator ashl after the gate"] = lambda: coordinate(behind, Recorder()), play_coordinator
    found["sync-switch by samples"] = lambda: create("sync-switch", N, samples=60), play_paradigm
    found["sync-switch by loss"] = lambda: create("sync-switch", N, plateau=0.5, window=2), play_paradigm
    allocated = job({"name": "asp"}, batches=ALLOCATED)
    found["coordinator with allocation"] = lambda: coordinate(allocated, Recorder()), play_coordinator
    for n_updates in (3, 10_000):
        found[f"coordinator of {n_updates} updates"] = (
            lambda n=n_updates: Coordinator(
                create("bsp", N), Recorder(), n_workers=N, lr=lambda *of: 0.1, stop=Stop(updates=n)
            ),
            play_coordinator,
        )
    found["peers of 5 updates"] = (
        lambda: PeerCoordinator(
            make_job(paradigm={"name": "allreduce"}, cluster={"workers": N}, stop={"updates": 5}), Recorder()
        ),
        play_peers,
    )
    for table in ({"name": "allreduce"}, {"name": "gossip", "mode": "push"}):
        this = job(table)
        found[f"peers {this.paradigm.name}"] = lambda j=this: PeerCoordinator(j, Recorder()), play_peers
    found["division"] = lambda: BatchDivision(Allocator(N, 40, maxima=[12] * N, interval=2)), play_division
    shared = job({"name": "allreduce"})
    found["iterations"] = lambda: Iterations(shared, 0, lambda: 0.0), play_iterations
    found["iterations of a stream"] = lambda: Iterations(shared, 0, lambda: 0.0), play_stream
    found["lockstep"] = (
        lambda: Lockstep(shared),
        lambda it, dice, n: [(it.exchanged(3, 3, dice.randrange(9)), it.enough()) for _ in range(n)],
    )
    found["evaluations"] = (
        lambda: EvaluationSchedule(10),
        lambda it, dice, n: [it.begin_if_due(it.next_samples + dice.randrange(-5, 30)) for _ in range(n)],
    )
    found["allocator"] = lambda: Allocator(N, 40, maxima=[math.inf, 20, 15.5, 30], interval=2), play_allocator
    found["search"] = lambda: Search(1, 99), lambda it, dice, n: [(it.evaluated(dice.random()), it.c) for _ in range(n)]
    found["k min"] = lambda: KController(N, policy="min", distinct=True), play_controller
    found["k state"] = lambda: KController(N, policy="state", distinct=True), play_controller
    found["k throughput"] = lambda: KController(N, policy="throughput", distinct=True), play_controller
    found["stragglers"] = StragglerDetector, play_detector
    compute = {"model": "lognormal", "seconds": 0.5}
    slowed = make_job(cluster={"workers": N, "compute": compute, "events": SLOW + AWAY})
    found["device"] = lambda: device(slowed, 0), play_device
    for name in CODECS:
        for feeds_back in (False, True) if name != "dgc" else (False,):
            found[f"codec {name} {feeds_back}"] = (
                lambda n=name, f=feeds_back: create_codec(n, LAYOUT, np.float32, seed=3, error_feedback=f),
                play_codec,
            )
    found["compressor"] = lambda: Compressor(create_codec("top-k", LAYOUT, np.float32)), play_compressor
    for name in ("last", "smoothing", "gru", "blend"):
        found[f"estimator {name}"] = (
            lambda n=name: Estimator(predictor(n, 1, 0, clock().__next__), tell_fixed=True),
            play_estimator,
        )
    for name in ELEMENTWISE:
        found[f"optimizer {name}"] = lambda n=name: LocalOptimizer(torch.ones(20), OptimizerSpec(n, 0.1)), play_vectors
        found[f"store {name}"] = lambda n=name: make_store(Descent(OptimizerSpec(n, 0.1).on_server)), play_store
    nesterov = OptimizerSpec("sgd", 0.1, {"momentum": 0.9, "nesterov": True})

    def ahead() -> tuple[torch.Tensor, LocalOptimizer]:
        weights = torch.ones(20)
        return weights, LocalOptimizer(weights, nesterov)

    found["optimizer with look-ahead"] = lambda: ahead()[1], play_vectors
    found["store with momentum"] = lambda: make_store(Descent(nesterov.on_server)), play_store
    found["store of outer steps"] = lambda: make_store(DelayedNesterov(0.9, 3, 0.2)), play_store
    found["store of a centre"] = lambda: make_store(Elastic()), play_store
    found["store that compensates"] = (
        lambda: make_store(DelayCompensated(nesterov.on_server, 2.0, 0.9)),
        play_read_store,
    )
    found["store of commits"] = lambda: make_store(Commit()), play_store
    evaluated = job({"name": "allreduce"}, evaluation={"every_samples": 30})
    found["peer machine"] = (
        lambda: PeerMachine(evaluated, 0, create_method(evaluated), NullPeer(), Sums()),
        play_peer_machine,
    )
    found["worker"] = lambda: WorkerMachine(0, 8, Estimator(predictor("last", 1, 0), tell_fixed=True)), play_machine
    falling: Any = lambda samples, steps: 1 / (1 + samples + steps)  # noqa: E731
    found["change"] = lambda: Change(*ahead(), falling, torch.empty(20)), play_contribution
    found["position"] = lambda: Position(*ahead(), falling, torch.zeros(20), 0.3), play_contribution
    found["peer"] = lambda: Peer(*ahead()), play_vectors
    found["script on a worker"] = lambda: OwnOptimizer(script()), play_script
    found["script on a server"] = script_store, play_script_store
    found["outer"] = lambda: Outer(torch.ones(20), lr=0.7, momentum=0.9, nesterov=True), play_vectors
    return found


CASES = cases()


# ---- comparing ----

# Attributes that follow from others, or are written before they are read again.
PASSING = {"_trace", "_clock", "_times", "_lefts", "_matrices", "_slots", "_done", "_serial", "_pinned"}
PASSING |= {"vector", "_read_bytes", "_waiting_since_s", "_wait_s", "_pull_s", "_read_s", "_load_s"}
PASSING |= {"_begin_s", "_end_s"}
PASSING |= {"_square", "_correction"}  # memory of one update
PASSING |= {"synchronous", "momentum"}  # of Sync-Switch: its next event sets them
PASSING |= {
    "n_samples",
    "share",
    "agreed",
    "loop",
    "in_loop",
    "data_read",
    "batch_size",
    "computed_s",
    "_skip_by",
    "_n_loaders",
    "_resumed_s",
    "_now",
}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two objects differ in any attribute, declared or not."""
    if type(one) is not type(other):
        return [where]
    if isinstance(one, torch.Tensor):
        one, other = one.detach().numpy(), other.detach().numpy()
    if isinstance(one, np.ndarray):
        same = np.array_equal(one, other, equal_nan=True)
        return [] if same else [where]
    if isinstance(one, float):
        return [] if one == other or (math.isnan(one) and math.isnan(other)) else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [where]
        return [found for key in one for found in differences(one[key], other[key], f"{where}[{key}]")]
    if isinstance(one, list | tuple | deque):
        if len(one) != len(other) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return [where]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, f"{where}[{i}]")]
    if isinstance(one, torch.optim.Optimizer):
        return differences(one.state_dict(), other.state_dict(), where)
    if isinstance(one, torch.nn.Module):
        return differences(dict(one.named_parameters()), dict(other.named_parameters()), where)
    if isinstance(one, Draws):
        return differences(one.position, other.position, where)
    attributes = {**getattr(one, "__dict__", {})}
    attributes |= {name: getattr(one, name) for name in getattr(type(one), "__slots__", ())}
    if type(one).__module__.startswith("hpcsync") and attributes:
        return [
            found
            for name, value in attributes.items()
            if name not in PASSING
            for found in differences(value, getattr(other, name, None), f"{where}.{name}")
        ]
    if isinstance(one, bool | int | str | None | set | frozenset):
        return [] if one == other else [where]
    return []  # functions, and what follows from the job


def through_files(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    write_part(folder, "part", state)
    return read_part(folder, "part")


def settled(it: Any) -> Any:
    """Return what is compared: of a store, whose buffers are windows, its state and its rule."""
    script = it._rule._optimizer if hasattr(it, "made") else it
    if isinstance(script, OwnOptimizer | PieceOptimizer):
        own = [script._lr] if isinstance(script, OwnOptimizer) else [script._options, script._momentum, script._stepped]
        return [script._kept, script.kept_in_groups, own, it.weights.clone() if hasattr(it, "made") else 0]
    return [it.state(), it._rule] if isinstance(it, Store) else it


def restored_from(make: Callable[[], Any], original: Any, state: dict[str, Any]) -> Any:
    it = make()
    if isinstance(it, LocalOptimizer):  # its weights are those of another object
        it._parameter.data.copy_(original._parameter.data)
    if isinstance(it, OwnOptimizer):
        it._script.flat.weights.copy_(original._script.flat.weights)
        for optimizer, another in zip(it._script.optimizers, original._script.optimizers, strict=True):
            for group, other in zip(optimizer.param_groups, another.param_groups, strict=True):
                group["lr"] = other["lr"]  # as the script itself sets it again
    if isinstance(it, Change):  # the next read replaces both
        it.weights.copy_(original.weights)
        it._read = original._read
    it.restore(state)
    return it


@pytest.mark.parametrize("name", CASES)
def test_a_restored_object_goes_on_as_the_original(name, tmp_path):
    make, play = CASES[name]
    for cut in (0, 1, 7, 40, 83):
        original = make()
        play(original, random.Random(1), cut)
        restored = restored_from(make, original, through_files(original.state(), tmp_path / str(cut)))
        assert not differences(settled(original), settled(restored))
        answers, again = (play(it, random.Random(2), 20) for it in (original, restored))
        assert not differences(answers, again)
        assert not differences(settled(original), settled(restored))


def test_a_script_keeps_its_numbers_when_an_older_checkpoint_has_some():
    make, play = CASES["script on a worker"]
    original, later = make(), make()
    play(original, random.Random(1), 7)
    *numbers, _ = later._script.step_to_make().numbers  # the last one is CountingAdam's own
    later.restore(original.state() | {"options": [[9.0]]})
    assert later._script.step_to_make().numbers[:-1] == numbers
    assert not differences(original._kept, later._kept)


# ---- negative control ----

CUTS = (5, 40, 83, 301)


def declared() -> list[Any]:
    """Every attribute that a class outside of `hpcsync.mpi` declares."""
    import hpcsync

    for module in pkgutil.walk_packages(hpcsync.__path__, "hpcsync."):
        if not module.name.startswith(("hpcsync.mpi", "hpcsync.bench", "hpcsync.cli", "hpcsync.__main__")):
            importlib.import_module(module.name)
    classes, found = [Stateful], []
    for owner in classes:
        new = [kind for kind in owner.__subclasses__() if kind.__module__.startswith("hpcsync.")]
        # Other tests may have imported the exchanges of peers, whose state is restored in tests/unit/mpi.
        classes += [kind for kind in new if kind not in classes and not kind.__module__.startswith("hpcsync.mpi.peer.")]
        names = vars(owner).get("state_types", {})
        names = [name for name in names if (owner, name) != (Search, "_largest")]  # for a search that begins later
        found += [pytest.param(owner, name, id=f"{owner.__name__}-{name}") for name in names]
    return found


def parts(it: Any) -> set[type]:
    """Return the classes, with their bases, of an object and of all objects in it that declare state."""
    found = {*type(it).__mro__}
    for value in vars(it).values():
        if isinstance(value, Stateful) and value is not it:
            found |= parts(value)
    return found


@pytest.fixture(scope="module")
def played() -> dict[tuple[str, int], Any]:
    found = {}
    for name, (make, play) in CASES.items():
        for cut in CUTS[: 2 if "codec" in name or "estimator" in name else None]:
            play(it := make(), random.Random(1), cut)
            found[name, cut] = it
    return found


@pytest.mark.parametrize(("owner", "attribute"), declared())
def test_an_attribute_that_is_not_declared_is_noticed(owner, attribute, monkeypatch, played):
    without = {key: owner.state_types[key] for key in owner.state_types if key != attribute}

    def noticed(name: str, original: Any) -> bool:
        with monkeypatch.context() as undeclared:
            undeclared.setattr(owner, "state_types", without)
            state = original.state()
            with suppress(StateError):  # raised where `restore` completes old checkpoints with it
                return bool(differences(settled(original), settled(restored_from(CASES[name][0], original, state))))
        return bool(differences(settled(original), settled(restored_from(CASES[name][0], original, state))))

    assert any(noticed(name, original) for (name, _), original in played.items() if owner in parts(original))


def test_generators_continue_where_they_were(tmp_path):
    def draw() -> list[Any]:
        return [random.gauss(0, 1), np.random.normal(), torch.randn(3)]

    draw()
    saved = through_files(rng_state.state(torch.device("cpu")), tmp_path / "a")
    expected = draw()
    draw()
    rng_state.restore(saved, torch.device("cpu"))
    assert not differences(draw(), expected)
    assert differences(draw(), expected)


def test_the_options_of_an_optimizer_follow_from_the_job(tmp_path):
    """Its learning rate is state; betas stay the tuple that they were, and steps are counted on."""
    weights, others = torch.ones(20), torch.ones(20)
    one, other = (LocalOptimizer(w, OptimizerSpec("adam", 0.1, {"betas": (0.5, 0.7)})) for w in (weights, others))
    play_vectors(one, random.Random(1), 3)
    other.restore(through_files(one.state(), tmp_path / "a"))
    groups = other._optimizer.state_dict()
    assert groups["param_groups"][0]["betas"] == (0.5, 0.7)
    assert groups["param_groups"][0]["lr"] == one._lr != 0.1
    assert groups["state"][0]["step"].dtype == torch.float32 and int(groups["state"][0]["step"]) == 3
