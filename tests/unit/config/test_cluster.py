"""The `[cluster]` of the job file: network and changes of devices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsync.config.cluster import Cluster, ClusterEvent, Network, absences
from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, refuse_simulated
from tests.unit.jobs import make_job, refusal

COMPUTE = {"model": "constant", "seconds": 1.0}


def cluster(*events: Any, **keys: Any) -> Job:
    return make_job(cluster={"workers": 4, "compute": COMPUTE, "events": list(events), **keys})


error = partial(refusal, cluster)


# ---- events ----

SLOW = {"worker": 1, "at_s": 5, "change": "slow", "factor": 4}
RECOVER = {"worker": 1, "at_iteration": 9, "change": "recover"}
LEAVE = {"worker": 3, "at_s": 2.5, "change": "leave"}
DIE = {"worker": 2, "at_s": 7.5, "change": "die", "restart_s": 60}


def test_events_are_read_in_the_order_of_the_file() -> None:
    job = Job.from_toml(
        """
        name = "x"
        workload.name = "timing"
        optimizer = {name = "sgd", lr = 1}
        stop.updates = 3
        paradigm.name = "asp"
        [cluster]
        compute = {model = "constant", seconds = 1}
        [[cluster.events]]
        worker = 2
        at_s = 5
        change = "slow"
        factor = 4
        [[cluster.events]]
        worker = 0
        at_iteration = 1
        change = "leave"
        """
    )
    assert job.cluster.events == (
        ClusterEvent(worker=2, at_s=5.0, change="slow", factor=4.0),
        ClusterEvent(worker=0, at_iteration=1, change="leave"),
    )
    assert Job.from_toml(job.to_toml()) == job


def test_without_events_nothing_happens() -> None:
    assert make_job().cluster.events == ()


MOMENTS = st.one_of(
    st.fixed_dictionaries({"at_s": st.floats(0, 1e9)}), st.fixed_dictionaries({"at_iteration": st.integers(1, 10**9)})
)
CHANGES = st.one_of(
    st.fixed_dictionaries({"change": st.just("slow"), "factor": st.floats(1e-9, 1e9)}),
    st.fixed_dictionaries({"change": st.sampled_from(["recover", "leave"])}),
)
EVENTS = st.builds(
    lambda worker, moment, change: {"worker": worker, **moment, **change}, st.integers(0, 3), MOMENTS, CHANGES
)


def test_deaths_restart_a_simulation_and_are_refused_on_real_ranks() -> None:
    job = cluster(LEAVE, DIE, on_death="restart")
    assert job.cluster.events[1].restart_s == 60.0 and Job.from_toml(job.to_toml()) == job
    assert refusal(refuse_simulated, job) == (
        'cluster.events[1].change = "die": must not be given to run, which ends no process; hpcsync simulate takes it'
    )
    refuse_simulated(cluster(LEAVE, on_death="restart", checkpoint_s=30))  # real checkpoints take what they take


def test_a_checkpoint_takes_less_than_the_time_between_two() -> None:
    between = {"checkpoint": {"seconds": 60}}
    assert refusal(make_job, cluster={"checkpoint_s": 60}, **between) == (
        "cluster.checkpoint_s = 60: must be less than checkpoint.seconds = 60, which is from one checkpoint to the next"
    )
    make_job(cluster={"checkpoint_s": 59}, **between)
    make_job(cluster={"checkpoint_s": 60}, checkpoint={"seconds": 0, "updates": 5})
    assert error(checkpoint_s=0) == "cluster.checkpoint_s = 0: must be at least 1e-09"
    assert "checkpoint_s" not in make_job().to_toml()


@given(st.lists(EVENTS, max_size=6))
def test_jobs_with_events_come_back_equal(events: list[dict[str, Any]]) -> None:
    job = cluster(*events)
    assert [event.model_dump(exclude_none=True) for event in job.cluster.events] == events
    assert Job.from_toml(job.to_toml()) == job
    assert Job.from_toml(job.to_toml()).to_toml() == job.to_toml()


KEYS = "worker, at_s, at_iteration, change, factor, restart_s"
MISTAKES = [
    # of the third event
    ({**LEAVE, "worker": 4}, ".worker = 4: must be 0 to 3 (cluster.workers = 4)"),
    ({**LEAVE, "worker": -1}, ".worker = -1: must be 0 to 3 (cluster.workers = 4)"),
    ({**LEAVE, "worker": "all"}, '.worker = "all": must be a whole number'),
    ({"at_s": 1, "change": "leave"}, ".worker: missing; must be the number of a worker, from 0"),
    ({**LEAVE, "at_s": -1}, ".at_s = -1: must be at least 0"),
    ({**LEAVE, "at_s": float("inf")}, ".at_s = inf: must be at most 1e+15"),
    ({**LEAVE, "at_s": "now"}, '.at_s = "now": must be a number'),
    ({**RECOVER, "at_iteration": 0}, ".at_iteration = 0: must be at least 1"),
    ({**RECOVER, "at_iteration": 1.5}, ".at_iteration = 1.5: must be a whole number"),
    ({**RECOVER, "at_s": 3}, ".at_iteration = 9: must be omitted beside at_s = 3.0"),
    (
        {"worker": 1, "change": "leave"},
        ".at_s: missing; must be seconds since the start of the run (or at_iteration: the worker's, from 1)",
    ),
    ({"worker": 1, "at_s": 1}, '.change: missing; must be "slow", "recover", "leave", "join" or "die"'),
    ({**LEAVE, "change": "go"}, ".change = \"go\": must be 'slow', 'recover', 'leave', 'join' or 'die'"),
    ({**SLOW, "factor": 0}, ".factor = 0: must be at least 1e-09"),
    ({**SLOW, "factor": 1e300}, ".factor = 1e+300: must be at most 1e+15"),
    ({**SLOW, "factor": "x"}, '.factor = "x": must be a number'),
    (
        {key: value for key, value in SLOW.items() if key != "factor"},
        ".factor: missing; must be a number greater than 0: how many times as long iterations take",
    ),
    ({**RECOVER, "factor": 1}, '.factor = 1: must be omitted: change = "recover" has none'),
    ({**LEAVE, "factor": 2}, '.factor = 2: must be omitted: change = "leave" has none'),
    ({**LEAVE, "restart_s": 2}, '.restart_s = 2: must be omitted: change = "leave" has none'),
    ({**DIE, "restart_s": -1}, ".restart_s = -1: must be at least 0"),
    (
        {key: value for key, value in DIE.items() if key != "restart_s"},
        ".restart_s: missing; must be seconds from the death until the restarted ranks train",
    ),
    (
        DIE,
        '.change = "die": must come with cluster.on_death = "restart"; a worker without which the others continue has '
        'change = "leave"',
    ),
    (
        {"worker": 1, "at_iteration": 3, "change": "die", "restart_s": 2},
        '.at_iteration = 3: must be at_s with change = "die"',
    ),
    ({**LEAVE, "at": 2}, f".at = 2: unknown key; must be one of {KEYS}; did you mean at_s?"),
    (3, " = 3: must be a table"),
]


@pytest.mark.parametrize(("event", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_in_events_name_the_event(event: Any, message: str) -> None:
    assert error(SLOW, LEAVE, event) == f"cluster.events[2]{message}"


def leave(worker: int, at_s: float) -> dict[str, Any]:
    return {"worker": worker, "at_s": at_s, "change": "leave"}


def join(worker: int, at_s: float) -> dict[str, Any]:
    return {"worker": worker, "at_s": at_s, "change": "join"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([leave(0, 2)], [(2, math.inf)]),
        ([leave(0, 3), leave(0, 2)], [(2, math.inf)]),
        ([join(0, 4), leave(0, 2)], [(2, 4)]),
        ([join(0, 1), leave(0, 2), join(0, 4), leave(0, 9)], [(0, 1), (2, 4), (9, math.inf)]),
        ([leave(0, 0), join(0, 1)], [(0, 1)]),
        ([SLOW], []),
    ],
)
def test_a_worker_is_away_from_leaving_to_joining_or_until_it_first_joins(events: Any, expected: Any) -> None:
    assert absences([ClusterEvent(**event) for event in events]) == expected


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"worker": 1, "at_iteration": 3, "change": "join"}], "[0].at_iteration = 3: must be at_s with change = "),
        ([join(1, 0)], ": worker 1 must leave before it joins at 0 s"),
        ([join(1, 3), join(1, 5)], ": worker 1 must leave before it joins at 5 s"),
        ([join(0, 3), leave(1, 3), join(1, 5), join(1, 6)], ": worker 1 must leave before it joins at 6 s"),
        ([leave(1, 3), join(1, 3)], ": worker 1 must leave before it joins at 3 s"),
        (
            [{"worker": 1, "at_iteration": 3, "change": "leave"}, join(1, 3)],
            '[1].change = "join": worker 1 must leave at_s, not at_iteration',
        ),
        (
            [leave(0, 1), leave(2, 1), leave(3, 1), join(1, 3)],
            "[3].at_s = 3: must be while another worker is active: the run ends when none is",
        ),
        ([join(worker, 2) for worker in range(4)], "[0].at_s = 2: must be while another worker is active"),
    ],
)
def test_joins_that_cannot_happen_are_refused(events: Any, message: str) -> None:
    assert error(*events).startswith(f"cluster.events{message}")


def test_another_worker_may_leave_at_an_iteration() -> None:
    events = [{"worker": 0, "at_iteration": 3, "change": "leave"}, leave(1, 2), join(1, 4)]
    assert len(cluster(*events).cluster.events) == 3


def test_joining_needs_servers() -> None:
    said = r'^cluster.events\[0\].change = "join": must be another with paradigm.name ='
    for paradigm in ({"name": "allreduce"}, {"name": "gossip", "mode": "pull"}, {"name": "local-sgd", "steps": 2}):
        with pytest.raises(JobError, match=said):
            make_job(paradigm=paradigm, cluster={"workers": 4, "events": [join(1, 2.0)]})
    make_job(cluster={"workers": 4, "events": [leave(1, 1.0), join(1, 2.0)]})


@pytest.mark.parametrize("events", [3, SLOW])
def test_events_are_a_list(events: Any) -> None:
    with pytest.raises(JobError, match=r"^cluster.events = .*: must be a list of tables, each of them \[\["):
        make_job(cluster={"events": events})


@pytest.mark.parametrize("event", [SLOW, RECOVER])
def test_only_known_times_can_change(event: dict[str, Any]) -> None:
    assert error(LEAVE, event, compute=None) == (
        f'cluster.events[1].change = "{event["change"]}": must come with [cluster.compute] or cluster.times_from, '
        "whose times it changes"
    )
    cluster(LEAVE, compute=None)
    cluster(LEAVE, event, compute=None, times_from="trace.h5")


# ---- the network ----


def test_every_rank_has_a_rate() -> None:
    assert Network().rates(1, 2) == [1.25e9] * 3
    assert Network(bandwidth_gbit=8).rates(2, 3) == [1e9] * 5
    assert Network(bandwidth_gbit=(8.0, 16.0)).rates(1, 2) == [2e9, 1e9, 2e9], "servers have the largest"
    assert Network(bandwidth_gbit=[8, 16], server_bandwidth_gbit=80).rates(2, 2) == [1e10, 1e10, 1e9, 2e9]
    assert Network(server_bandwidth_gbit=4).rates(1, 1) == [5e8, 1.25e9]


BANDWIDTH = "must be a number from 1e-09 to 1e+15, or a list of them, one per worker"


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"bandwidth_gbit": 0}, f"bandwidth_gbit = 0: {BANDWIDTH}"),
        ({"bandwidth_gbit": [1, 2, 3, 0]}, f"bandwidth_gbit = [1, 2, 3, 0]: {BANDWIDTH}"),
        ({"bandwidth_gbit": float("inf")}, f"bandwidth_gbit = inf: {BANDWIDTH}"),
        ({"bandwidth_gbit": []}, f"bandwidth_gbit = []: {BANDWIDTH}"),
        ({"bandwidth_gbit": True}, f"bandwidth_gbit = true: {BANDWIDTH}"),
        (
            {"bandwidth_gbit": [1, 2]},
            "bandwidth_gbit = [1.0, 2.0]: must be one number, or a list of cluster.workers = 4 numbers",
        ),
        ({"server_bandwidth_gbit": 0}, "server_bandwidth_gbit = 0: must be at least 1e-09"),
        ({"server_bandwidth_gbit": [1]}, "server_bandwidth_gbit = [1]: must be a number"),
        ({"latency_us": -1}, "latency_us = -1: must be at least 0"),
        ({"latency_us": 1e300}, "latency_us = 1e+300: must be at most 1e+15"),
        ({"bandwidth_gbit": 1e-300}, f"bandwidth_gbit = 1e-300: {BANDWIDTH}"),
        ({"server_bandwidth_gbit": 1e-300}, "server_bandwidth_gbit = 1e-300: must be at least 1e-09"),
    ],
)
def test_mistakes_in_the_network(network: dict[str, Any], message: str) -> None:
    assert error(network=network) == f"cluster.network.{message}"


@pytest.mark.parametrize(
    "network", [{}, {"bandwidth_gbit": [1, 2, 3, 4.5]}, {"server_bandwidth_gbit": 100.0, "latency_us": 0}]
)
def test_jobs_with_a_network_come_back_equal(network: dict[str, Any]) -> None:
    job = cluster(network=network)
    assert Job.from_toml(job.to_toml()) == job


# ---- times from a trace ----


def test_the_trace_of_times_need_not_be_there_to_read_a_job() -> None:
    job = cluster(times_from="no/such/trace.h5")
    assert Job.from_toml(job.to_toml()) == job
    assert error(times_from=3) == "cluster.times_from = 3: must be a string"


# ---- deaths ----


@pytest.mark.parametrize(
    ("paradigm", "named"),
    [
        ({"name": "allreduce"}, 'paradigm.name = "allreduce"'),
        ({"name": "local-sgd", "steps": 2}, 'paradigm.name = "local-sgd"'),
        ({"name": "gossip", "mode": "permutation"}, 'paradigm.mode = "permutation"'),
        ({"name": "gossip", "mode": "pull", "synchronous": True}, "paradigm.synchronous = true"),
    ],
    ids=str,
)
def test_workers_that_exchange_together_cannot_leave(paradigm: dict[str, Any], named: str) -> None:
    script = {"workload": {"name": "script"}, "stop": {}}
    for tables, allowed in (({}, '"end" or "restart"'), (script, '"end"')):
        assert refusal(make_job, **tables, paradigm=paradigm, cluster={"workers": 3, "on_death": "continue"}) == (
            f'cluster.on_death = "continue": must be {allowed} with {named}, whose exchanges need all workers'
        )
    make_job(paradigm=paradigm, cluster={"workers": 3, "on_death": "restart"})


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "gossip", "mode": "push-sum"}], ids=str)
def test_others_go_on(paradigm: dict[str, Any]) -> None:
    job = make_job(paradigm=paradigm, cluster={"workers": 3, "on_death": "continue"})
    assert Job.from_toml(job.to_toml()).cluster.on_death == "continue"


def test_all_workers_may_be_the_fewest() -> None:
    assert cluster(workers_min=4).cluster.workers_min == 4
    assert error(workers_min=5) == "cluster.workers_min = 5: must be at most cluster.workers = 4"


def test_servers_on_the_nodes_of_workers() -> None:
    assert not Cluster().colocated
    assert Cluster(servers=3, workers=3, colocated=True).colocated


@pytest.mark.parametrize(
    "table, message",
    [
        ({"servers": 4}, "cluster.servers = 4: must be at most cluster.workers = 3 with cluster.colocated = true"),
        ({"placement": "spread"}, 'cluster.placement = "spread": must be omitted with cluster.colocated = true'),
        (
            {"network": Network(server_bandwidth_gbit=40)},
            "cluster.network.server_bandwidth_gbit = 40: must be omitted with cluster.colocated = true",
        ),
    ],
)
def test_colocation_that_is_not_possible(table, message) -> None:
    with pytest.raises(JobError, match=message):
        Cluster(colocated=True, **table)
