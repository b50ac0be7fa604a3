"""A worker without servers as a coroutine of actions: their order, its counts, and its end."""

import json
from typing import Any

import pytest

from hpcsync.core.peer_machine import Computed, PeerMachine, create_method
from hpcsync.paradigms.gossip import AVERAGING
from hpcsync.paradigms.peer_method import PENDING, Agreed, ExchangeResult, StepCounts, Transport
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.training.local_update import NullPeer, Received
from tests.unit.jobs import make_job

ALLREDUCE = {"name": "allreduce"}
N_SAMPLES = 4


def local(steps: int, **options: float) -> dict[str, Any]:
    return {"name": "local-sgd", "steps": steps, **options}


def gossip(mode: str, **options: Any) -> dict[str, Any]:
    return {"name": "gossip", "mode": mode, **options}


class Weights:
    """Weights that are a list of what happened to them."""

    n_bytes = 40

    def __init__(self) -> None:
        self.weight = 1.0
        self.seen: list[Any] = []

    def mix(self, other: Any, beta: float) -> None:
        self.seen.append(("mix", other, beta))

    def adopt(self, model: Any) -> None:
        self.seen.append(("adopt", model))

    def give(self) -> str:
        self.weight /= 2
        return "model"

    def absorb(self, received: Received, *, drew_itself: bool) -> None:
        self.seen.append(("absorb", received.count, drew_itself))
        self.weight += received.weight


Call = tuple[Any, ...]


class Recording(Transport):
    """A transport that keeps the calls as tuples, without the worker, and returns given results at once."""

    def __init__(self, **results: Any) -> None:
        self.calls: list[Call] = []
        self.results = {
            "agree": lambda counts: Agreed.of([counts]),  # with nobody
            "sum": lambda counts, lr: (Agreed.of([counts]), ExchangeResult(ALL_PEERS, 80, 1)),
            "average": lambda contributes: ("mean", 160),
            "read": lambda peer: "read",
            **results,
        }  # fmt: skip

    def __getattribute__(self, name: str) -> Any:
        if name not in vars(Transport) or name.startswith("__"):
            return super().__getattribute__(name)

        def call(worker: int, *arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return self.results.get(name, lambda *_: None)(*arguments)

        return call


def machine(
    paradigm: dict[str, Any],
    workers: int = 2,
    worker: int = 0,
    transport: Transport | None = None,
    *,
    evaluated: bool = True,
    **tables: Any,
) -> PeerMachine:
    job = make_job(paradigm=paradigm, cluster={"workers": workers}, **tables)
    return PeerMachine(job, worker, create_method(job), Weights(), transport or Recording(), evaluated=evaluated)


class Engine:
    """A machine and the calls of its latest iteration."""

    def __init__(self, this: PeerMachine, **results: Any) -> None:
        self.machine = this
        this.transport.results |= results

    def advance(self, n_samples: int = N_SAMPLES, *, stop: bool = False, halt: bool = False) -> ExchangeResult:
        self.calls.clear()
        coroutine, value = self.machine.advance(n_samples, stop=stop, halt=halt), None
        try:
            while True:
                value = coroutine.send(value)
        except StopIteration as end:
            return end.value

    @property
    def calls(self) -> list[Call]:
        return self.machine.transport.calls

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


# ---- actions of an iteration ----


def test_weights_are_averaged_after_so_many_local_steps():
    engine = Engine(machine(local(3), evaluation={"every_samples": 12}, stop={"samples": 36}))
    for _ in range(2):
        assert engine.advance() == ExchangeResult(NO_PEER)
        assert engine.names == ["step"]
    assert engine.advance() == ExchangeResult(ALL_PEERS, 160, 0)
    assert engine.names == ["step", "agree", "publish_for_evaluation", "average"], (
        "published as they are before the averaging"
    )
    assert engine.calls[1] == ("agree", StepCounts(3, 3 * N_SAMPLES))
    assert engine.calls[2] == ("publish_for_evaluation", 2 + 3)
    assert engine.machine.update.seen == [("adopt", "mean")]


@pytest.mark.parametrize("outer", [{"outer_lr": 0.7}, {"outer_momentum": 0.9}], ids=str)
def test_diloco_is_published_after_the_outer_step(outer):
    """Its model is the result of the outer step; the mean before it is none that workers continue from."""
    engine = Engine(machine(local(2, **outer), evaluation={"every_samples": 8}, stop={"samples": 24}))
    engine.advance()
    engine.advance()
    assert engine.names == ["step", "agree", "average", "publish_for_evaluation"]
    assert engine.calls[-1] == ("publish_for_evaluation", 2 + 2)


def test_gradients_are_summed_and_published_after_the_step():
    engine = Engine(machine(ALLREDUCE, evaluation={"every_samples": 4}))
    assert engine.advance() == ExchangeResult(ALL_PEERS, 80, 1)
    assert engine.names == ["sum", "publish_for_evaluation"]
    assert engine.calls[0] == ("sum", StepCounts(1, N_SAMPLES), 0.1)


def test_the_last_iteration_is_not_evaluated():
    engine = Engine(machine(local(1), evaluation={"every_samples": 4}, stop={"samples": 8}))
    engine.advance()
    assert "publish_for_evaluation" in engine.names and not engine.machine.stopped
    engine.advance()
    assert "publish_for_evaluation" not in engine.names and engine.machine.stopped


@pytest.mark.parametrize(
    ("paradigm", "step"), [(gossip("push", period=2), ("step", 0.1, 0)), (gossip("pull", period=2), ("step", 0.1, 3))]
)
def test_without_evaluations_an_asynchronous_worker_publishes_for_its_peers_alone(paradigm, step):
    engine = Engine(machine(paradigm, evaluated=False))
    engine.advance()
    assert engine.calls == [step]


def test_without_evaluations_synchronous_workers_publish_nothing_and_know_when_one_would_be_due():
    engine = Engine(machine(ALLREDUCE, evaluation={"every_samples": 4}, evaluated=False))
    engine.advance()
    assert engine.names == ["sum"]
    other = Engine(machine(ALLREDUCE, evaluation={"every_samples": 4}))
    other.advance()
    assert engine.machine.state() == other.machine.state()


def test_an_asynchronous_worker_publishes_every_step_before_its_exchange():
    engine = Engine(machine(gossip("pull", period=2, include_self=False, beta=0.3)))
    engine.advance()
    assert engine.calls == [("step", 0.1, 3)]
    assert engine.advance() == ExchangeResult(1, 40, 1)
    assert engine.calls == [("step", 0.1, 4), ("read", 1)]
    assert engine.machine.update.seen == [("mix", "read", 0.3)]


@pytest.mark.parametrize("mode", ["push", "push-sum"])
def test_a_push_is_sent_before_the_inbox_is_emptied(mode):
    received = Received(None, 3, 0.75)
    engine = Engine(machine(gossip(mode, include_self=False)), collect=lambda: received)
    assert engine.advance() == ExchangeResult(1, 40, 3)
    assert engine.calls[1:] == [("send", 1, "model", 0.5), ("collect",)]
    assert engine.machine.update.seen == [("absorb", 3, False)]


def test_a_worker_that_draws_itself_sends_nothing():
    engine = Engine(machine(gossip("push"), workers=1), collect=lambda: Received(None, 1, 0.5))
    assert engine.advance() == ExchangeResult(0, 0, 1)
    assert engine.names == ["step", "collect"]
    assert engine.machine.update.seen == [("absorb", 1, True)]
    assert engine.machine.update.weight == 1.5, "nothing was given away"


def swapped(mode: str, worker: int) -> tuple[Engine, ExchangeResult, tuple[Any, ...]]:
    """Return the engine, the result and the arguments of a synchronous exchange of three workers."""
    paradigm = gossip(mode, include_self=False, synchronous=True) | ({"beta": 0.3} if mode in AVERAGING else {})
    engine = Engine(machine(paradigm, workers=3, worker=worker), swap=lambda *_: Received("sum", 2, 1.5))
    result = engine.advance()
    ((_, *arguments),) = (call for call in engine.calls if call[0] == "swap")
    return engine, result, tuple(arguments)


@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("mode", ["pull", "push", "push-sum", "permutation"])
def test_a_synchronous_exchange_names_every_source(mode, worker):
    engine, result, (model, weight, sources, targets) = swapped(mode, worker)
    peers = create_method(make_job(paradigm=gossip(mode, include_self=False), cluster={"workers": 3})).peers
    drawn = peers.permutation(1) if mode == "permutation" else [peers.drawn(each, 1) for each in range(3)]
    if mode == "pull":
        assert sources == [[peer] for peer in drawn]
    else:
        assert sources == [[source for source, peer in enumerate(drawn) if peer == each] for each in range(3)]
    assert targets == [[target for target, own in enumerate(sources) if each in own] for each in range(3)]
    assert (model, weight) == (("model", 0.5) if targets[worker] else (None, 1.0))
    assert result == ExchangeResult(drawn[worker], 40, 2)
    mixed = ("mix", "sum", 0.3) if mode in AVERAGING else ("absorb", 2, False)
    assert engine.machine.update.seen == [mixed]


def test_a_forgotten_worker_is_not_drawn():
    drawn = {False: set(), True: set()}
    for forgotten, peers in drawn.items():
        engine = Engine(machine(gossip("pull"), workers=3))
        if forgotten:
            engine.machine.method.forget(2)
        for _ in range(30):
            peers.add(engine.advance().peer)
    assert drawn == {False: {0, 1, 2}, True: {0, 1}}


# ---- learning rates ----

COSINE = {"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine", "total": 100}}


def summed(*_: Any) -> tuple[Agreed, ExchangeResult]:
    return Agreed(2, 2, 2 * N_SAMPLES, False), ExchangeResult()


@pytest.mark.parametrize("paradigm", [ALLREDUCE, local(1), gossip("pull")], ids=str)
def test_the_rate_follows_the_work_before_the_step(paradigm):
    """Of all workers: a replica takes the others to be as far as itself."""
    engine = Engine(machine(paradigm, optimizer=COSINE), sum=summed)
    rates = []
    for _ in range(3):
        engine.advance()
        name, *arguments = engine.calls[0]
        rates.append(arguments[1 if name == "sum" else 0])
    assert rates[0] == 0.1
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 3
    others = Engine(machine(ALLREDUCE, optimizer=COSINE), sum=summed)
    for rate in rates:
        others.advance()
        assert others.calls[0][2] == rate


# ---- all workers end after the same iteration ----


def together(paradigm: dict[str, Any], workers: int, leaves: dict[int, int], **tables: Any) -> list[int]:
    """Run synchronous machines, of which some leave after an iteration; return each one's last iteration."""
    asked: dict[int, StepCounts] = {}

    class Waiting(Recording):
        """A transport that lets every worker wait for the others."""

        def __init__(self, worker: int) -> None:
            def wait(counts: StepCounts, *_: Any) -> object:
                asked[worker] = counts
                return PENDING

            super().__init__(agree=wait, sum=wait)

    machines = [machine(paradigm, workers, worker, Waiting(worker), **tables) for worker in range(workers)]
    coroutines: dict[int, Any] = {}

    def advance(worker: int, value: Any = None) -> None:
        """Carry on until the worker waits or its last iteration has ended."""
        this = machines[worker]
        while worker in coroutines or not this.stopped:
            if worker not in coroutines:
                n_samples = 0 if this.iteration >= leaves.get(worker, 10**9) else N_SAMPLES
                coroutines[worker], value = this.advance(n_samples, stop=False), None
            try:
                while (value := coroutines[worker].send(value)) is not PENDING:
                    pass
                return
            except StopIteration:
                del coroutines[worker]

    for worker in range(workers):
        advance(worker)
    while asked:
        assert len(asked) == workers, "a worker that has ended is waited for"
        agreed = Agreed.of([asked.pop(worker) for worker in range(workers)])
        for worker in range(workers):
            advance(worker, (agreed, ExchangeResult()) if paradigm is ALLREDUCE else agreed)
    return [this.iteration for this in machines]


@pytest.mark.parametrize("leaves", [{}, {1: 5}, {0: 3, 2: 8}, {0: 0, 1: 0, 2: 0}], ids=str)
@pytest.mark.parametrize("paradigm", [ALLREDUCE, local(1), local(4), gossip("permutation", period=3)], ids=str)
@pytest.mark.parametrize("stop", [{"samples": 130}, {"updates": 35}], ids=str)
def test_synchronous_workers_end_together(paradigm, leaves, stop):
    assert len(set(together(paradigm, 3, leaves, stop=stop))) == 1


def test_a_worker_that_miscounts_is_noticed(monkeypatch):
    """The control: a machine which believes that those that have left still contribute ends before the others."""
    advance = PeerMachine._exchange_together

    def miscounting(self: PeerMachine, *of: Any) -> Any:
        result = yield from advance(self, *of)
        if self.worker == 1:
            self.lockstep._n_contributing = 3
        return result

    monkeypatch.setattr(PeerMachine, "_exchange_together", miscounting)
    with pytest.raises(AssertionError, match="has ended is waited for"):
        together(local(4), 3, {0: 3, 2: 8}, stop={"updates": 35})


def test_a_worker_that_has_left_steps_no_more():
    engine = Engine(machine(local(2)))
    engine.advance(0)
    assert engine.calls == []
    engine.advance(0)
    assert engine.calls == [("agree", StepCounts(0, 0))] and engine.machine.stopped, "no worker made a step"


def test_a_worker_that_has_left_still_adopts_the_mean():
    engine = Engine(machine(local(1)), agree=lambda _: Agreed(1, 1, N_SAMPLES, False))
    assert engine.advance(0).n_received == 1
    assert engine.calls[1:] == [("average", False)]
    assert engine.machine.update.seen == [("adopt", "mean")]


def test_a_stop_is_agreed_on():
    engine = Engine(machine(local(2)))
    engine.advance(stop=True)
    assert not engine.machine.stopped
    engine.advance(stop=True)
    assert engine.calls[1][1].stop and engine.machine.stopped


def test_an_asynchronous_worker_stops_when_asked():
    engine = Engine(machine(gossip("pull")))
    engine.advance()
    assert not engine.machine.stopped
    engine.advance(stop=True)
    assert engine.machine.stopped


@pytest.mark.parametrize("workers", [1, 2])
def test_only_a_single_worker_counts_by_itself(workers):
    engine = Engine(machine(gossip("pull"), workers, stop={"updates": 3}))
    for _ in range(3):
        assert not engine.machine.stopped
        engine.advance()
    assert engine.machine.stopped == (workers == 1)


# ---- step infos ----


def test_a_step_info_has_what_both_know():
    this = machine(gossip("push-sum"))
    Engine(this).advance()
    computed = Computed(N_SAMPLES, 1.0, 2.0, 0.75, 0.0625)
    info = this.step_info(ExchangeResult(1, 40, 2), computed, 0.25, 0.125, 0.5, 0.3, 1, (2.0, 1.5))
    assert info._asdict() == {
        "worker": 0, "iteration": 1, "peer": 1, "wire_bytes": 40, "compute_s": 0.75, "wait_s": 0.25, "comm_s": 0.125,
        "loss": 0.5, "batch_size": N_SAMPLES, "begin_s": 1.0, "end_s": 2.0, "n_received": 2,
        "weight": this.update.weight, "load_s": 0.0625, "lr": 0.3, "problem": 1,
        "gradient_sq": 2.0, "mean_gradient_sq": 1.5,
    }  # fmt: skip


def test_the_rest_is_absorbed_after_the_end():
    this = machine(gossip("push-sum"))
    assert this.absorb_rest(9.0) is None
    Engine(this, rest=lambda: Received(None, 2, 0.5))
    info = this.absorb_rest(9.0)
    assert (info.peer, info.batch_size, info.n_received, info.weight, info.begin_s) == (NO_PEER, 0, 2, 1.5, 9.0)
    assert this.update.seen == [("absorb", 2, False)]


# ---- checkpoints ----


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("paradigm", [ALLREDUCE, local(3), gossip("pull", period=2)], ids=str)
def test_a_restored_machine_goes_on_as_the_first(paradigm, restored):
    tables = {"optimizer": COSINE, "stop": {"samples": 100}, "evaluation": {"every_samples": 20}}
    first, second = Engine(machine(paradigm, **tables)), Engine(machine(paradigm, **tables))
    for _ in range(6):
        first.advance()
    if restored:
        second.machine.restore(json.loads(json.dumps(first.machine.state())))
    same = []
    while not first.machine.stopped and first.machine.iteration < 40:
        first.advance()
        second.advance()
        same.append(first.calls == second.calls)
    assert len(same) > 3 and all(same) == restored


def test_synchronous_workers_halt_after_an_agreed_exchange():
    engine = Engine(machine(local(2)))
    engine.advance(halt=True)
    assert not engine.machine.at_halt(requested=True), "between exchanges"
    engine.advance()
    assert not engine.machine.at_halt(requested=True), "not agreed"
    engine.advance()
    engine.advance(halt=True)
    assert engine.machine.at_halt(requested=False)


@pytest.mark.parametrize(("n_steps", "all_halt"), [(6, True), (5, False)])
def test_a_worker_that_has_ended_cannot_halt(n_steps, all_halt):
    agreed = Agreed(3, n_steps, n_steps * N_SAMPLES, False, True)
    engine = Engine(machine(local(2), workers=3, stop={"samples": 1000}), agree=lambda _: agreed)
    engine.advance()
    engine.advance()
    assert engine.machine.at_halt(requested=False) and engine.machine.all_halt(3) == all_halt


def test_asynchronous_workers_halt_when_asked():
    this = machine(gossip("pull"))
    assert this.at_halt(requested=True) and not this.at_halt(requested=False) and this.all_halt(2)


# ---- without arithmetic ----


def test_push_sum_weights_are_kept_without_arithmetic():
    job = make_job(paradigm=gossip("push-sum", include_self=False), cluster={"workers": 2})
    inboxes: dict[int, Received] = {}
    engines = []

    def send(peer: int, model: None, weight: float) -> None:
        inboxes[peer] = Received(model, 1, weight)

    for worker in range(2):
        transport = Recording(send=send, collect=lambda worker=worker: inboxes.pop(worker, None))
        engines.append(Engine(PeerMachine(job, worker, create_method(job), NullPeer(8, push_sum=True), transport)))
    for round in range(8):
        engines[round % 2].advance()
        in_transit = sum(received.weight for received in inboxes.values())
        assert sum(engine.machine.update.weight for engine in engines) + in_transit == 2.0
    assert engines[0].machine.update.weight != 1.0


def test_a_paradigm_with_servers_has_no_method():
    with pytest.raises(ValueError, match="must be a paradigm without servers"):
        create_method(make_job())
