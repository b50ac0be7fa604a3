"""The recount, compared with slow reference implementations."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsync.audit.server_recount import Recount
from hpcsync.trace.iteration_counts import NEVER, follow, running_count
from hpcsync.trace.schema import Outcome
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import PARADIGMS, as_trace, job_of, play, record, remove, with_status

HOWS = [
    {},
    {"jitter": 0.5},
    {"leave": {2: 4}},
    {"leave": {0: 5, 1: 3}},
    {"leave": {0: 3, 1: 3, 2: 3}},
    {"stop_s": 11.05},
]


def walk(trace):
    """Yield each worker's push count and the active workers after each event of a trace."""
    counts, active = [0] * trace.n_workers, set(range(trace.n_workers))
    rows = [(row["seq"], row["worker"], True) for row in trace.tables["pushes"]]
    rows += [(row["seq"], row["worker"], False) for row in trace.tables["membership"]]
    for seq, worker, is_push in sorted(rows):
        if is_push:
            counts[worker] += 1
        else:
            active.remove(worker)
        yield seq, worker, is_push, list(counts), set(active)


@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_leads_equal_those_of_a_walk(paradigm, how):
    trace = record(paradigm, **how)
    recount = Recount(trace)
    fewest = lambda counts, active: min(counts[worker] for worker in active)  # noqa: E731
    steps = list(walk(trace))
    expected = [counts[worker] - fewest(counts, active) for _, worker, push, counts, active in steps if push]
    assert recount.push_lead.tolist() == expected
    for row, gap_iters in zip(trace.tables["grants"], recount.grant_lead, strict=True):
        *_, counts, active = [step for step in steps if step[0] < row["seq"]][-1]
        assert gap_iters == counts[row["worker"]] - fewest(counts, active)


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_versions_equal_those_of_a_walk(paradigm):
    trace = record(paradigm, jitter=0.5, leave={1: 4})
    recount = Recount(trace)
    pushes = trace.tables["pushes"]
    applied = list(pushes[pushes["outcome"] == Outcome.APPLIED])
    if paradigm == "ashl-after-gate":
        applied.sort(key=lambda row: row["version_read"] + row["staleness"])
        assert [row["seq"] for row in applied] != sorted(row["seq"] for row in applied)
    applied = [row["seq"] for row in applied]
    versions, last_seqs = [], []
    for update in trace.tables["updates"]:
        taken = list(itertools.islice(applied, len(versions), len(versions) + int(update["n_contributions"])))
        versions += [update["version"]] * len(taken)
        last_seqs.append(taken[-1])
    assert recount.applied_version.tolist() == versions
    assert recount.complete_seq.tolist() == last_seqs


def test_pushes_and_grants_are_matched():
    recount = Recount(record("ssp", jitter=0.5))
    for row, push in enumerate(recount.pushes):
        answer = recount.grants[recount.push_grant[row]]
        assert (answer["worker"], answer["iteration"]) == (push["worker"], push["iteration"] + 1)
        permit = recount.push_permit[row]
        assert (permit == -1) == (push["iteration"] == 1)
        assert permit == -1 or recount.grants[permit]["iteration"] == push["iteration"]


def test_running_count():
    assert running_count(np.array([5, 3, 5, 5, 3, 9])).tolist() == [1, 1, 2, 3, 2, 1]
    assert running_count(np.array([], int)).tolist() == []


def test_an_unfinished_trace_is_counted_up_to_the_first_missing_row():
    trace = record("asp")
    cut = remove(with_status(trace, "failed"), "grants", 10)
    missing = trace.tables["grants"]["seq"][10]
    recount = Recount(cut)
    assert recount.horizon == missing
    assert recount.pushes["seq"].max() < missing
    assert Recount(with_status(cut, "finished")).horizon == NEVER


@pytest.mark.parametrize("status", ["running", "finished"])
def test_an_empty_trace_has_empty_counts(status):
    recount = Recount(as_trace(job_of("asp"), [], status=status))
    for counted in (recount.push_lead, recount.grant_lead, recount.min_iters, recount.complete_seq, recount.push_grant):
        assert len(counted) == 0
    assert recount.stop_seq == NEVER


def test_a_departure_before_any_push():
    job, rows = job_of("ssp"), Recorder()
    play(job, rows, (1.0, 1.0, 1.0), leave={0: 1, 1: 1})
    recount = Recount(as_trace(job, rows.rows))
    assert recount.left_after(np.arange(3), np.full(3, -1)).tolist() == [0, 1, len(recount.events) - 1]
    assert [recount.active(event).tolist() for event in (-1, 0, 1, 2)] == [[0, 1, 2], [1, 2], [2], [2]]
    assert recount.n_active[[-1, 0, 1, 2]].tolist() == [3, 2, 1, 1]
    assert recount.push_lead.max() == 0


def reference_iters(n_workers, events):
    """Return the iteration counts of each event's worker and of the slowest active one, found by linear search."""
    iters, active, least, found = [0] * n_workers, set(range(n_workers)), 0, []
    for worker, kind in events:
        if kind == "push":
            iters[worker] += 1
        elif kind == "join":
            iters[worker] = max(iters[worker], least)
            active.add(worker)
        else:
            active.remove(worker)
        least = min((iters[w] for w in active), default=least)
        found.append((iters[worker], least))
    return found


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_iteration_counts_equal_the_reference(n_workers, steps):
    events, active = [], set(range(n_workers))
    for worker, pushes in steps:
        if worker < n_workers:
            kind = ("push" if pushes else "leave") if worker in active else "join"
            events.append((worker, kind))
            active = active - {worker} if kind == "leave" else active | {worker}
    rows = np.array(
        [(worker, kind == "push", kind == "join") for worker, kind in events],
        [("worker", "<i8"), ("is_push", "?"), ("joins", "?")],
    )
    own, slowest = follow(n_workers, rows, rows["is_push"])
    assert list(zip(own.tolist(), slowest.tolist(), strict=True)) == reference_iters(n_workers, events)


def test_active_workers_after_each_event():
    trace = record("ssp", leave={1: 2}, changes=[(9.0, 1), (11.0, 0), (20.0, 0)])
    recount, active = Recount(trace), {0, 1, 2}
    changes = dict(zip(trace.tables["membership"]["seq"].tolist(), trace.tables["membership"].tolist(), strict=True))
    assert [change[3] for change in changes.values()][:4] == [0, 1, 2, 1]
    for number, event in enumerate(recount.events):
        if (change := changes.get(int(event["seq"]))) is not None:
            active = active | {change[2]} if change[3] == 1 else active - {change[2]}
        assert set(recount.active(number).tolist()) == active
        assert recount.n_active[number] == len(active)


# ---- the k family ----------------------------------------------------------------------------------------------------


def test_k_is_the_job_s_until_a_decision_changes_it():
    trace = record('name = "k-sync"\nk = "state"', (1.0, 1.1, 3.0, 3.2), updates=100)
    decisions = trace.tables["decisions"]
    of = dict(zip(decisions["version"].tolist(), decisions["chosen"].tolist(), strict=True))
    expected, k = [], 4
    for version in range(101):
        k = of.get(version, k)
        expected.append(k)
    assert Recount(trace).k.tolist() == expected, "k of the updates after version 0, 1, ..., 100"
    assert trace.tables["updates"]["n_contributions"].tolist() == expected[:-1]
    assert Recount(record("k-sync")).k.tolist() == [2] * 41
    assert Recount(record("bsp")).k is None


@pytest.mark.parametrize("paradigm", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
@pytest.mark.parametrize("leave", [{}, {0: 5}, {0: 4, 1: 4}, {0: 4, 1: 4, 2: 4}])
def test_update_events(paradigm, leave):
    """Compare update events with the order of the coordinator's rows."""
    job, rows, seqs = job_of(paradigm, 4), Recorder(), []

    class Recording:
        def append(self, table, row):
            if table == "updates":
                seqs.append(max(seq for seq in appended))
            elif table in ("grants", "decisions", "membership"):
                appended.append(row[0])
            rows.append(table, row)

    appended = [0]
    play(job, Recording(), (1.0, 1.4, 3.1, 2.2), leave=leave)
    recount = Recount(as_trace(job, rows.rows))
    made = recount.events["seq"][recount.update_event]
    # The row before an update is that of the departure that made it, or is followed by the push that made it.
    assert len(made) == len(seqs)
    for seq, before in zip(made, seqs, strict=True):
        assert seq >= before
        grants = recount.grants["seq"]
        assert not ((grants > before) & (grants < seq)).any()


def test_many_workers_with_many_rows_are_told_apart():
    """The product of a worker's number and a `seq` may exceed 32 bits, the type of the column `worker`."""
    trace = record("ashl", jitter=0.5)

    def moved(table):
        rows = table.copy()
        rows["worker"] += 1000
        rows["seq"] += 3_000_000
        return rows

    tables = {
        name: moved(rows) if "seq" in rows.dtype.names and name != "starts" else rows
        for name, rows in trace.tables.items()
    }
    attributes = {**trace.attributes, "n_workers": 1000 + trace.n_workers}
    few, many = Recount(trace), Recount(dataclasses.replace(trace, tables=tables, attributes=attributes))
    assert many.grant_count.tolist() == few.grant_count.tolist()
    chosen = [
        each.in_force("local-steps", each.grants["worker"], each.grants["seq"], 1.0).tolist() for each in (few, many)
    ]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
