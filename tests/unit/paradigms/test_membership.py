"""Every paradigm under pushes, departures and joins in any order, with any options that are allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hpcsync.paradigms import PARADIGMS, create
from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.dssp import DSSP
from hpcsync.paradigms.events import Elapsed, Event, Grant, Joined, Left, PushInfo
from hpcsync.paradigms.ssp import SSP
from tests.stateful import STATEFUL, assert_caught
from tests.unit.paradigms import broken
from tests.unit.paradigms.schedule import referee_of

NO_BOUND = math.inf
BOUNDS = st.sampled_from([0, 1, 2, 5, math.inf])


def k_of(n_workers: int, **more: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    fixed = st.fixed_dictionaries({"k": st.integers(1, n_workers), **more})
    chosen = {"k": st.sampled_from(["state", "loss", "min"]), "k_min": st.integers(1, n_workers), **more}
    return st.one_of(fixed, st.fixed_dictionaries(chosen))


def dssp(n_workers: int) -> st.SearchStrategy[dict[str, Any]]:
    limits = st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["bounded", "paper"]))
    return limits.map(lambda drawn: {"staleness_min": drawn[0], "staleness_max": drawn[0] + drawn[1], "mode": drawn[2]})


def ashl(n_workers: int) -> st.SearchStrategy[dict[str, Any]]:
    # Stages so short that all are passed within a test.
    options = {
        "staleness": BOUNDS,
        "loss_preset": st.sampled_from([None, 0.5]),
        "plateau": st.sampled_from([0.01, 0.9]),
        "share": st.sampled_from(["data", "equal"]),
        "commit": st.sampled_from(["on-arrival", "after-gate"]),
        "warmup": st.integers(0, 1),
        "profiled": st.just(2),
    }
    with_ratios = st.fixed_dictionaries({**options, "ratio_coarse": st.just(None), "ratio_fine": st.just(None)})
    return st.one_of(st.fixed_dictionaries(options), with_ratios)


def async_diloco(n_workers: int) -> st.SearchStrategy[dict[str, Any]]:
    options = {
        "steps": st.integers(1, 9),
        "by_speed": st.booleans(),
        "quorum": st.integers(1, n_workers),
        "grace_s": st.sampled_from([0.0, 0.5, 2.0]),
        "weigh": st.sampled_from(["samples", "equal"]),
    }
    return st.fixed_dictionaries(options)


ADSP = {
    "check_period_s": st.just(4.0),
    "interval_min_s": st.just(0.5),
    "search_every_s": st.sampled_from([8.0, 99.0]),
    "rule": st.sampled_from(["cumulative", "released"]),
    "commits": st.sampled_from([None, 1, 3]),
}
SWITCH = {
    "then": st.sampled_from([ASP, partial(SSP, staleness=1), partial(DSSP, staleness_min=0, staleness_max=2)]),
    "samples": st.sampled_from([0, math.inf]),
    "plateau": st.sampled_from([None, 0.01, 0.9]),
    "window": st.integers(1, 2),
}
NONE = st.just({})
CANCEL = {"cancel": st.sampled_from(["drop", "abort"])}
LATE = {
    "staleness_max": st.sampled_from([0, 1, 3, math.inf, None]),
    "staleness_weight": st.sampled_from(["none", "inverse"]),
}

# For each paradigm its options, given the number of workers.
OPTIONS: dict[str, Callable[[int], st.SearchStrategy[dict[str, Any]]]] = {
    "bsp": lambda n_workers: NONE,
    "asp": lambda n_workers: NONE,
    "ssp": lambda n_workers: st.fixed_dictionaries({"staleness": BOUNDS}),
    "dssp": dssp,
    "easgd": lambda n_workers: st.fixed_dictionaries({"synchronous": st.booleans()}),
    "k-sync": lambda n_workers: k_of(n_workers, **CANCEL),
    "k-batch-sync": lambda n_workers: k_of(n_workers, **CANCEL),
    "k-async": lambda n_workers: k_of(n_workers, **LATE),
    "k-batch-async": lambda n_workers: k_of(n_workers, **LATE),
    "ashl": ashl,
    "adsp": lambda n_workers: st.fixed_dictionaries(ADSP),
    "async-diloco": async_diloco,
    "sync-switch": lambda n_workers: st.fixed_dictionaries(SWITCH),
}


def bound_of(name: str, options: dict[str, Any]) -> float:
    """Return the largest lead at which a worker may start an iteration."""
    if name == "bsp" or options.get("synchronous"):
        return 0
    if name == "dssp":
        return options["staleness_max"] if options["mode"] == "bounded" else NO_BOUND
    if name == "sync-switch":
        then = getattr(options["then"], "keywords", {})
        return then.get("staleness", then.get("staleness_max", NO_BOUND))
    return options["staleness"] if name == "ssp" else NO_BOUND


class Membership(RuleBasedStateMachine):
    """Workers that push, leave and join in any order; the referee recounts, and the end is replayed."""

    name = ""
    create: Callable[..., Paradigm] = staticmethod(create)
    checks = True  # whether the paradigm's own check runs at every event
    sound = False

    @initialize(data=st.data(), n_workers=st.integers(1, 4))
    def begin(self, data: st.DataObject, n_workers: int) -> None:
        drawn = data.draw(OPTIONS[self.name](n_workers))
        self.make = lambda: self.create(self.name, n_workers, **drawn)
        self.paradigm = self.make()
        self.referee = referee_of(self.paradigm, bound_of(self.name, drawn))
        if (staleness_max := drawn.get("staleness_max")) is not None and self.name in ("k-async", "k-batch-async"):
            self.referee.staleness_max = staleness_max
        self.now_s = 0.0
        self.sound = True
        self.granted = {worker: (0.0, self.paradigm.first(worker)) for worker in range(n_workers)}

    def handle(self, event: Event) -> None:
        self.sound = False
        actions = self.paradigm.handle(event)
        self.referee.see(event, actions)
        if self.checks:
            self.paradigm.check()
        for action in actions:
            if isinstance(action, Grant):
                self.granted[action.worker] = (event.now_s, action)
        self.sound = True

    def computing(self) -> list[int]:
        return sorted(self.referee.active - self.referee.blocked_since_s.keys())

    def away(self) -> list[int]:
        return sorted(set(range(self.paradigm.n_workers)) - self.referee.active)

    @precondition(lambda self: self.referee.active)
    @rule(
        numbers=st.lists(st.integers(0, 11), min_size=1, max_size=6),
        after_s=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5, 7.0]),
        loss=st.sampled_from([1.0, 0.9, 0.4, 0.0]),
    )
    def push(self, numbers: list[int], after_s: float, loss: float) -> None:
        for number in numbers:
            self.push_once(number, after_s, loss)

    def push_once(self, number: int, after_s: float, loss: float) -> None:
        worker = self.computing()[number % len(self.computing())]
        self.now_s += after_s
        began_s, grant = self.granted[worker]
        steps, iteration_s = max(1, grant.local_steps), self.now_s - began_s
        self.handle(
            PushInfo(
                self.now_s,
                worker,
                compute_s=iteration_s,
                comm_s=0.4,
                pull_s=0.3,
                encode_s=0.01,
                local_steps=steps,
                loss=loss,
            )
        )

    @precondition(lambda self: len(self.referee.active) > 1)  # without any the run ends, which is the teardown
    @rule(number=st.integers(0, 11))
    def leaves(self, number: int) -> None:
        self.handle(Left(self.now_s, sorted(self.referee.active)[number % len(self.referee.active)]))

    @precondition(lambda self: self.away())
    @rule(number=st.integers(0, 11), after_s=st.sampled_from([0.0, 1.0]))
    def joins(self, number: int, after_s: float) -> None:
        self.now_s += after_s
        self.handle(Joined(self.now_s, self.away()[number % len(self.away())]))

    @precondition(lambda self: self.paradigm.due is not None)
    @rule(late_s=st.sampled_from([0.0, 1.0]))
    def time_comes(self, late_s: float) -> None:
        due = self.paradigm.due
        self.now_s = max(self.now_s, due.now_s) + late_s
        self.handle(Elapsed(self.now_s, due.worker))

    def teardown(self) -> None:
        if not self.sound:
            return  # an event has failed
        while self.computing():  # the referee fails if others are blocked for ever
            self.handle(Left(self.now_s, self.computing()[0]))
        trace = self.referee.trace
        assert not self.referee.active, "every worker is released and leaves"
        assert self.referee.settled == self.referee.pushes, "not one contribution per push"
        events = {kind: sum(isinstance(event, kind) for event, _ in trace) for kind in (PushInfo, Joined, Left)}
        answers = events[PushInfo] + events[Joined] - len(self.referee.actions(Grant))
        assert 0 <= answers <= events[Left], "not one grant per push"
        again = self.make()
        assert repr([(event, again.handle(event)) for event, _ in trace]) == repr(trace), "a replay gives other actions"


def machine(name: str, **attributes: Any) -> type[Membership]:
    return type(f"Membership-{name}", (Membership,), {"name": name, **attributes})


def test_the_options_of_every_paradigm_are_drawn():
    assert OPTIONS.keys() == PARADIGMS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_pushes_departures_and_joins_in_any_order(name):
    run_state_machine_as_test(machine(name), settings=settings(STATEFUL, max_examples=25))


@pytest.mark.parametrize(
    ("name", "paradigm", "message"),
    [
        ("asp", broken.GrantsTwice, "answers no push"),
        ("asp", broken.GrantsBeforeApplying, "before its own contribution is applied"),
        ("asp", broken.JoinsWhereItWas, "the lead is|min_iters"),
        ("asp", broken.RemembersOtherRuns, "a replay gives other actions"),
        ("bsp", broken.OverwritesAContribution, "before its own contribution|beyond the bound of 0|stale"),
        ("bsp", broken.BlocksEveryWorker, "every worker is blocked"),
        ("ssp", broken.NeverReleases, "blocked"),
        ("ssp", broken.BringsBackStaleEntries, "answers no push"),
        ("ssp", broken.JoinsAnywhere, "beyond the bound of"),
        ("k-async", broken.AcceptsLateContributions, "a stale contribution"),
    ],
)
def test_a_broken_paradigm_is_caught(name, paradigm, message):
    def create(name, n_workers, **options):
        return paradigm(n_workers, **options)

    assert_caught(machine(name, create=staticmethod(create), checks=False), message)
