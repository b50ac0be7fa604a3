"""Declarations: what follows by default says nothing untrue, and traits that state one fact twice agree."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from hpcsync.audit.bounds import GUARANTEES
from hpcsync.core.assignments import create_paradigm
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.asp import ASP
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.paradigms.peer_method import PeerMethod
from tests.unit.jobs import REQUIRED, make_job


@dataclass(frozen=True, kw_only=True)
class Served(ParadigmOptions):
    """Paradigm with servers that declares nothing else."""

    name: str = "served"
    policy = ASP


class Exchange(PeerMethod):
    """Exchange that is all of a paradigm without servers."""

    transport = "average"
    period = 3


@dataclass(frozen=True, kw_only=True)
class Peers(ParadigmOptions):
    """Paradigm without servers that declares its method."""

    name: str = "peers"
    contribution = "position"
    exchange: ClassVar[type[PeerMethod]] = Exchange

    def method(self, n_workers: int, seed: int) -> PeerMethod:
        """Return the exchange."""
        return self.exchange()


@pytest.mark.parametrize(
    ("traits", "bound"),
    [
        ({}, "workers wait as its policy decides"),
        ({"guarantees": ("nobody-waits",), "waiting": "one"}, "no worker waits for another"),
        ({"waiting": "a worker waits for `k` others"}, "a worker waits for k others"),
    ],
)
def test_without_a_bound_on_the_lead_messages_repeat_who_waits(traits: dict[str, Any], bound: str) -> None:
    options = type("Waiting", (Served,), traits)()
    assert (options.bound, options.describe(3)) == (bound, bound)


@pytest.mark.parametrize(
    ("traits", "bound"),
    [
        ({"lead_bound": 0}, "all workers wait for each other in every iteration"),
        ({"lead_bound": 0, "contribution": "change"}, "all workers wait for each other after every push"),
        ({"lead_bound": 0, "exchange_every": 5}, "all workers wait for each other every 5 iterations"),
        ({"lead_bound": 2}, "a worker more than 2 iterations ahead of the slowest waits for it"),
        ({"lead_bound": 2, "contribution": "change"}, "a worker more than 2 pushes ahead of the slowest waits for it"),
    ],
)
def test_a_bound_on_the_lead_counts_pushes_where_these_are_of_local_steps(traits: dict[str, Any], bound: str) -> None:
    assert type("Bounded", (Served,), traits)().bound == bound


def test_batches_are_allocated_where_workers_send_gradients() -> None:
    """An allocation would replace the local steps that a policy grants by those of the job."""
    of_change = type("OfChange", (Served,), {"contribution": "change"})
    assert (Served().allocates, of_change().allocates, Peers().allocates) == (True, False, False)


def test_what_workers_without_servers_do_follows_from_their_method() -> None:
    options = Peers()
    assert (options.lead_bound, options.exchange_every) == (0, 3)
    assert options.bound == "all workers wait for each other every 3 iterations"
    moved = ("every 3 iterations move", "9 bytes of weights from each worker to others")
    assert options.moves("9 bytes", "as many bytes", compressed=False) == moved
    alone = type("Alone", (Peers,), {"exchange": type("Own", (Exchange,), {"synchronous": False})})()
    assert (alone.lead_bound, alone.bound) == (float("inf"), "no worker waits for another")


@pytest.mark.parametrize("name", OPTIONS)
def test_declarations_agree(name: str) -> None:
    options = OPTIONS[name](**REQUIRED.get(name, {}))
    method = options.method(2, 0)
    assert (method is None) == options.has_servers, "a paradigm has a policy or a method"
    assert method is None or method.one_model == options.one_model, "`one_model` must be that of the method"
    if method is not None and not method.one_model:
        assert options.contribution == "position", 'workers exchange weights: contribution must be "position"'
    assert method is None or method.transport != "swap" or options.needs_all, "each worker waits for its sender"
    assert set(options.guarantees) <= set(GUARANTEES), "the audit knows no such guarantee"
    if options.has_servers:
        job = make_job(paradigm={"name": name, **REQUIRED.get(name, {})}, stop={"samples": 1000})
        policy = create_paradigm(job)
        assert policy.name == name
        in_phases = len(options.phases) > 1
        assert in_phases or policy.synchronous == options.of_one_version, "`of_one_version` must be that of the policy"
    assert options.waiting and options.update, "the table of paradigms says who waits and what an update is"
