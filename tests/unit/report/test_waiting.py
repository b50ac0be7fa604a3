"""Who waited for whom: closed forms, sums that must agree with the rows, and the reading in slices."""

import numpy as np
import pytest

from hpcsync.core.assignments import decision_fields
from hpcsync.report import intervals
from hpcsync.report.explanation import explain, sentences
from hpcsync.report.waiting import each_wait, waits
from hpcsync.trace.reader import opened
from hpcsync.trace.schema import TABLES, Change, Release, complete
from hpcsync.trace.writer import TraceWriter
from tests.unit.simulator.runs import simulated
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import attributes, edit, job_of, play, record, with_rows

SERVED = ["bsp", "asp", "ssp", "dssp", "easgd", "k-sync", "k-async", "ashl", "adsp", "async-diloco", "batches"]


def waited_s(trace):
    """Return the waiting of each worker, and the time for which it was blocked before an iteration without a row."""
    table = "pushes" if trace.job.has_servers else "exchanges"
    rows, grants = trace.tables[table], trace.tables["grants"]
    n = trace.n_workers
    last = np.zeros(n, int)
    np.maximum.at(last, rows["worker"], rows["iteration"])
    open_grants = grants[(grants["iteration"] > last[grants["worker"]]) & (grants["released_by"] != Release.END)]
    return [np.bincount(each["worker"], each[key], n) for each, key in ((rows, "wait_s"), (open_grants, "held_s"))]


@pytest.mark.parametrize("paradigm", SERVED)
def test_every_second_is_attributed_once(paradigm):
    trace = record(paradigm, jitter=0.3)
    found = waits(trace)
    total_s = np.asarray(found.between_s.sum(axis=1)).ravel() + found.timed_s + found.unknown_s + found.messages_s
    in_rows_s, without_row_s = waited_s(trace)
    np.testing.assert_allclose(total_s, in_rows_s + without_row_s, atol=1e-9)
    np.testing.assert_allclose(found.messages_s, 0.0, atol=1e-9)  # messages take no time here
    assert not found.unknown_s.any()
    assert not found.between_s.diagonal().any()


def test_bsp_waits_for_the_last_push_of_each_round():
    trace = record("bsp", (1.0, 1.2, 1.3), jitter=0.5)
    expected_s = np.zeros((3, 3))
    pushes = trace.tables["pushes"]
    for version in range(trace.tables["updates"]["version"][-1]):
        of_round = pushes[pushes["version_read"] == version]
        for push in of_round:
            expected_s[push["worker"], of_round["worker"][-1]] += of_round["now_s"][-1] - push["now_s"]
    np.testing.assert_allclose(waits(trace).between_s.toarray(), expected_s, atol=1e-9)
    assert (expected_s > 0).sum() > 3  # not always the same worker
    (each,) = each_wait(trace)
    assert each.seconds.min() > 0 and each.seconds.sum() == pytest.approx(expected_s.sum())
    assert set(each.until_s) == set(trace.tables["updates"]["now_s"])


def test_a_worker_that_is_blocked_when_the_run_ends_waits_for_nobody():
    found = waits(record("dssp", jitter=0.3, stop_s=8.3))
    assert found.ended_s.any() and not found.unknown_s.any()


def test_a_worker_that_dies_is_waited_for():
    trace = record("bsp", jitter=0.3, changes=[(1.9, 2)])
    assert trace.tables["membership"]["change"][0] == Change.DIED
    assert waits(trace).between_s[0, 2] > 0
    assert set(np.flatnonzero(waits(trace).caused_s).tolist()) >= {2}


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "ssp", "staleness": 1}])
def test_a_grant_that_a_worker_left_unused_takes_no_time_of_messages(tmp_path, paradigm):
    events = [{"worker": 0, "at_s": 2.0, "change": "leave"}, {"worker": 0, "at_s": 4.0, "change": "join"}]
    trace = simulated(tmp_path, paradigm, [0.1, 0.2, 0.3], events=events)
    grants, pushes = trace.tables["grants"], trace.tables["pushes"]
    found = waits(trace)
    np.testing.assert_allclose(found.messages_s, 0.0, atol=1e-9)  # messages take no time here
    pushed = grants[np.isin(grants["iteration"], pushes["iteration"][pushes["worker"] == 0]) & (grants["worker"] == 0)]
    assert len(pushed) == len(np.unique(pushed["iteration"])) + 1
    assert pushed["held_s"].sum() > pushes["wait_s"][pushes["worker"] == 0].sum()


@pytest.mark.parametrize(("n_fc", "load_s"), [(1, 0.0), (2, 0.0), (1, 0.25)])
def test_waits_with_separated_layers_end_with_the_last_bar_of_their_iteration(n_fc, load_s):
    sizes = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
    layers = {"name": "stanza", "cut": "classifier", "fc_share": 0.5, "fc_workers": n_fc}
    trace = peer_recorder.record(layers, (1.0, 1.3, 1.1, 1.2), workload=sizes, samples=640)
    rows = trace.tables["exchanges"].copy()
    rows["begin_s"] -= load_s
    rows["load_s"] += load_s
    trace = with_rows(trace, "exchanges", rows)
    bars = intervals.bars_of(trace, intervals.iterations(trace))
    last_s = bars[bars["activity"] == "wait"].groupby(["worker", "iteration"])["end_s"].max()
    assert len(last_s) > 20
    found = sorted((worker, until_s) for wait in each_wait(trace) for until_s, worker in zip(*wait[:2], strict=True))
    expected = sorted((worker, end_s) for (worker, _), end_s in last_s.items())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_another_release_is_another_cause():
    trace = record("ssp", jitter=0.3)
    grants, pushes = trace.tables["grants"], trace.tables["pushes"]
    row = int(np.flatnonzero(grants["held_s"] > 0)[0])
    other = pushes[pushes["worker"] == (1 if grants["worker"][row] == 0 else 0)]["seq"][0]
    before, after = waits(trace).caused_s, waits(edit(trace, "grants", row, released_by=other)).caused_s
    assert before[2] - after[2] == pytest.approx(grants["held_s"][row])


def test_without_releases_the_cause_is_unknown():
    trace = record("ssp", jitter=0.3)
    rows = trace.tables["grants"]
    older = rows[[name for name in rows.dtype.names if name != "released_by"]].copy()
    found = waits(with_rows(trace, "grants", complete(older, TABLES["grants"])))
    assert found.unknown_s.sum() == pytest.approx(rows["held_s"].sum())
    assert not found.caused_s.any()


def test_a_release_by_an_event_that_the_trace_does_not_have_is_unknown():
    trace = record("ssp", jitter=0.3)
    grants = trace.tables["grants"]
    row = int(np.flatnonzero(grants["held_s"] > 0)[0])
    last = max(trace.tables[table]["seq"].max(initial=0) for table in ("pushes", "grants", "decisions", "membership"))
    found = waits(edit(trace, "grants", row, released_by=last + 1))
    assert found.unknown_s.sum() == pytest.approx(grants["held_s"][row])


def test_a_time_that_elapsed_is_nobody():
    found = waits(record("async-diloco", jitter=0.3))
    assert found.timed_s.any()


@pytest.mark.parametrize("paradigm", ["bsp", "async-diloco"])
def test_slices_change_nothing(tmp_path, paradigm):
    job, path = job_of(paradigm, updates=20), tmp_path / "trace.h5"
    with TraceWriter(path, attributes(job), decision_fields(job)) as trace:
        play(job, trace, (1.0, 1.3, 2.1), jitter=0.3)
    found = []
    for slice_rows in (3, 100_000):
        with opened(path, slice_rows) as file:
            found.append(waits(file))
    np.testing.assert_allclose(found[0].between_s.toarray(), found[1].between_s.toarray())
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_slices_of_exchanges_change_nothing(tmp_path):
    trace = simulated(tmp_path, {"name": "allreduce"}, [0.1, 0.2, 0.3], jitter=0.3)
    (path,) = tmp_path.glob("*/trace.h5")
    with opened(path, 3) as file:
        found = waits(file)
    np.testing.assert_allclose(found.between_s.toarray(), waits(trace).between_s.toarray())
    assert not found.unknown_s.any()


def test_all_reduce_waits_for_the_last_worker_of_each_iteration(tmp_path):
    trace = simulated(tmp_path, {"name": "allreduce"}, [0.1, 0.2, 0.3])
    between_s = waits(trace).between_s.toarray()
    n = int(trace.tables["updates"]["version"][-1])
    np.testing.assert_allclose(between_s, [[0, 0, 0.2 * n], [0, 0, 0.1 * n], [0, 0, 0]], atol=1e-9)
    (each,) = each_wait(trace)
    np.testing.assert_allclose(each.until_s[each.worker == 1], 0.3 * np.arange(1, n + 1))
    np.testing.assert_allclose(each.seconds[each.worker == 1], 0.1)


@pytest.mark.parametrize("paradigm", ["permutation", "ring", "pull-together", "push-together", "local-sgd"])
def test_workers_that_exchange_in_the_same_round_wait_for_the_last_one(paradigm):
    trace = peer_recorder.record(paradigm)
    rows, expected_s = trace.tables["exchanges"], np.zeros((3, 3))
    for row in rows[rows["wait_s"] > 0]:
        (of_round,) = np.nonzero(rows["iteration"] == row["iteration"])
        last = rows[of_round[rows["end_s"][of_round].argmax()]]
        assert row["end_s"] + row["wait_s"] == pytest.approx(last["end_s"])
        expected_s[row["worker"], last["worker"]] += row["wait_s"]
    assert expected_s.any()
    found = waits(trace)
    np.testing.assert_allclose(found.between_s.toarray(), expected_s, atol=1e-9)
    assert not found.unknown_s.any()


def test_ad_psgd_waits_for_its_partner(tmp_path):
    trace = simulated(tmp_path, {"name": "ad-psgd"}, [0.1, 0.2, 0.3, 0.15], network={"bandwidth_gbit": 0.001})
    found, rows = waits(trace), trace.tables["exchanges"]
    total_s = np.asarray(found.between_s.sum(axis=1)).ravel() + found.unknown_s
    np.testing.assert_allclose(total_s, np.bincount(rows["worker"], rows["wait_s"], 4), atol=1e-9)
    others = rows[(rows["wait_s"] > 0) & (rows["peer"] >= 0) & (rows["peer"] != rows["worker"])]
    (each,) = each_wait(trace)
    np.testing.assert_array_equal(each.until_s, others["end_s"] + others["wait_s"])
    pairs = set(zip(others["worker"].tolist(), others["peer"].tolist(), strict=True))
    assert set(zip(*(each.tolist() for each in found.between_s.nonzero()), strict=True)) == pairs


def test_waiting_of_unknown_cause_is_not_taken_for_an_old_trace():
    trace = peer_recorder.record("ad-psgd")
    assert waits(trace).unknown_s.sum() > 0.01 * trace.tables["exchanges"]["wait_s"].sum()
    (said,) = (line for line in sentences(explain(trace), None) if "that the trace does not record" in line)
    assert "version" not in said
