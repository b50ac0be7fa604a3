"""Comparison of two traces."""

import io

import numpy as np
import pytest
from rich.console import Console

from hpcsync.paradigms.records import UNTIL
from hpcsync.report.trace_pair import compare, table
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import TABLES
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import job_of, record


def trace(grants, *, step_s=1.0, wait_s=0.25, updates=4, n_workers=2, engine="mpi", samples=8) -> Trace:
    """Make a trace with these grants (worker, iteration), and with an update and a push every second."""
    tables = {
        "grants": np.zeros(len(grants), TABLES["grants"]),
        "updates": np.zeros(updates, TABLES["updates"]),
        "pushes": np.zeros(updates, TABLES["pushes"]),
        "membership": np.zeros(0, TABLES["membership"]),
    }
    tables["grants"]["worker"], tables["grants"]["iteration"] = np.array(grants).reshape(-1, 2).T
    tables["grants"]["local_steps"] = 1
    tables["updates"]["now_s"] = tables["pushes"]["now_s"] = step_s * np.arange(1, updates + 1)
    tables["updates"]["samples"] = samples * np.arange(1, updates + 1)
    tables["pushes"]["compute_s"], tables["pushes"]["wait_s"] = 1.0 - wait_s, wait_s
    job = job_of("asp", workers=n_workers)
    return Trace(None, {"engine": engine, "n_workers": n_workers, "job": job.to_toml()}, tables)


ORDER = [(0, 2), (1, 2), (0, 3), (1, 3), (0, 4)]


def test_the_same_trace_twice():
    comparison = compare(trace(ORDER), trace(ORDER))
    assert (comparison.time_ratio, comparison.same_order) == (1.0, 1.0)
    assert (comparison.common_grants, comparison.same_grants) == (5, 5)


def test_order_of_pairs_of_grants():
    swapped = [(0, 2), (0, 3), (1, 2), (1, 3), (0, 4)]
    comparison = compare(trace(ORDER), trace(swapped))
    assert comparison.same_order == pytest.approx(9 / 10)
    assert comparison.same_grants == 1
    assert compare(trace(ORDER), trace(ORDER[::-1])).same_order == 0.0
    assert [compare(trace(ORDER[:n]), trace(ORDER)).same_order for n in (1, 2)] == [None, 1.0]


def test_only_common_grants_count():
    comparison = compare(trace([*ORDER, (1, 4)]), trace([(0, 2), (5, 2), *ORDER[1:]], n_workers=6))
    assert comparison.common_grants == 5
    assert comparison.same_order == 1.0
    assert comparison.same_grants == 1


def test_a_grant_that_is_repeated_after_a_return_counts_once():
    repeated = trace([*ORDER[:3], (0, 3), *ORDER[3:]])
    for other in (repeated, trace(ORDER)):
        comparison = compare(repeated, other)
        assert (comparison.common_grants, comparison.same_grants, comparison.same_order) == (5, 5, 1.0)


def test_grants_of_as_many_steps_as_fit_are_counted():
    adsp = record("adsp", jitter=0.3)
    comparison = compare(adsp, adsp)
    n = int((adsp.tables["grants"]["local_steps"] == UNTIL).sum())
    assert (comparison.common_grants, comparison.same_grants, comparison.same_order) == (n, n, 1.0)
    assert n > 10


def test_stops_are_not_counted_as_grants():
    one = trace(ORDER)
    one.tables["grants"]["local_steps"][-1] = 0
    assert compare(one, trace(ORDER)).common_grants == 4


def test_traces_are_compared_up_to_their_common_samples():
    comparison = compare(trace(ORDER, updates=4), trace(ORDER, updates=9, step_s=1.5))
    assert comparison.samples == 32
    assert [side.time_s for side in comparison.sides] == [4.0, 6.0]
    assert comparison.time_ratio == 1.5


def test_updates_of_different_size_are_compared_by_their_samples():
    """With updates of two gradients and of one gradient, 32 samples are two updates and four updates."""
    one_by_one, barrier = trace(ORDER, updates=4), trace(ORDER, updates=2, step_s=3.0, samples=16)
    comparison = compare(one_by_one, barrier)
    assert (comparison.samples, comparison.time_ratio) == (32, 1.5)
    assert compare(one_by_one, trace(ORDER, updates=2, step_s=3.0)).samples == 16
    between = compare(trace(ORDER, updates=3), barrier)  # no update of the barrier ends with 24 samples
    assert (between.samples, [side.time_s for side in between.sides]) == (24, [3.0, 6.0])


def test_waiting_is_a_share_of_the_workers_time():
    a, b = compare(trace(ORDER, wait_s=0.25), trace(ORDER, wait_s=0.5)).sides
    assert (a.wait_share, b.wait_share) == (0.25, 0.5)


def test_shares_of_time_end_with_the_common_samples():
    longer = trace(ORDER, updates=9)
    longer.tables["pushes"]["load_s"] = 1.0
    longer.tables["pushes"]["wait_s"][4:] = 9.0
    a, b = compare(trace(ORDER), longer).sides
    assert (a.wait_share, b.wait_share) == (0.25, 0.125)


def test_without_servers_there_are_no_grants():
    one, other = peer_recorder.record("allreduce"), peer_recorder.record("pull")
    comparison = compare(one, other)
    assert (comparison.common_grants, comparison.same_order) == (0, None)
    assert comparison.samples == one.tables["updates"]["samples"][-1] < other.tables["updates"]["samples"][-1]
    assert comparison.sides[0].wait_share > comparison.sides[1].wait_share == 0.0
    rows, side = one.tables["exchanges"], comparison.sides[0]
    total_s = sum(rows[column].sum() for column in ("compute_s", "wait_s", "comm_s"))
    assert side.time_s == one.tables["updates"]["now_s"][-1]
    assert side.comm_share == pytest.approx(rows["comm_s"].sum() / total_s)


def test_empty_traces_can_be_compared():
    comparison = compare(trace([], updates=0), trace(ORDER))
    assert (comparison.samples, comparison.time_ratio, comparison.same_order) == (0, None, None)
    assert comparison.sides[0].wait_share is None


def test_table_has_both_sides():
    text = io.StringIO()
    simulated = trace(ORDER, step_s=2.0, wait_s=0.5, engine="simulator")
    Console(file=text, width=100).print(table(compare(trace(ORDER), simulated)))
    assert [line.split() for line in text.getvalue().splitlines()[3:5]] == [
        ["waiting", "25.00", "%", "50.00", "%"],
        ["transfers", "0.00", "%", "0.00", "%"],
    ]
    assert "time of 32 samples  4.000 s    8.000 s  2.000" in text.getvalue()
    assert (
        "5 common grants: 100.00 % of the pairs are in the same order, the first 5 grants are the same"
        in text.getvalue()
    )
