"""Time between iterations: the same in the summary, the explanation, the figure, the report and a comparison."""

from itertools import pairwise

import numpy as np
import pytest

from hpcsync.figures import waiting
from hpcsync.html_report import run_data
from hpcsync.report import live, trace_pair
from hpcsync.report.between import Between
from hpcsync.report.explanation import explain, sentences
from hpcsync.report.summary import summarize
from hpcsync.trace.schema import TABLES, Change
from hpcsync.trace.writer import TraceWriter
from tests.unit.report.test_summary import text
from tests.unit.simulator.runs import simulated
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import attributes, record, with_rows

GAP_S = 0.25
PARTS = ("load", "compute", "wait", "comm")


def with_gaps(trace, gap_s=GAP_S):
    """Return the trace with so much time before every iteration of a worker but the first."""
    rows = trace.tables["exchanges"].copy()
    for column in ("begin_s", "end_s"):
        rows[column] += gap_s * (rows["iteration"] - 1)
    return with_rows(trace, "exchanges", rows)


@pytest.fixture
def trace():
    return with_gaps(peer_recorder.record("ad-psgd", (1.0, 1.3, 2.1, 1.1)))


def test_shares_add_up_to_the_same_total_everywhere(trace, tmp_path):
    rows = trace.tables["exchanges"]
    made = rows[rows["batch_size"] > 0]
    gaps_s = GAP_S * (np.bincount(made["worker"]) - 1)
    parts_s = np.array([[made[f"{part}_s"][made["worker"] == w].sum() for part in PARTS] for w in range(4)])
    shares = np.column_stack([parts_s, gaps_s]) / (parts_s.sum(axis=1) + gaps_s)[:, None]
    wait_share = parts_s[:, 2].sum() / (parts_s.sum() + gaps_s.sum())

    summary, found = summarize(trace), explain(trace)
    in_summary = [[getattr(w, f"{part}_share") for part in (*PARTS, "between")] for w in summary.workers]
    np.testing.assert_allclose(in_summary, shares, atol=1e-9)
    assert summary.wait_share == pytest.approx(wait_share)
    np.testing.assert_allclose(found.between_s, gaps_s, atol=1e-9)
    drawn = waiting.shares(trace)
    np.testing.assert_allclose(drawn.loc[range(4), [f"{p}_share" for p in waiting.COLUMNS]], shares[:, :4], atol=1e-9)
    with TraceWriter(tmp_path / "trace.h5", attributes(trace.job)) as file:
        for row in rows.tolist():
            file.append("exchanges", row)
    reported = run_data.read(file.path, summary, audited=False)
    np.testing.assert_allclose(reported.parts_s, np.column_stack([parts_s, gaps_s]), atol=1e-9)
    watched = live.RowTally(4)
    for some in np.array_split(rows, 7):
        watched.add("exchanges", some)
    np.testing.assert_allclose(watched.shares.T, shares[:, :4], atol=1e-9)
    assert trace_pair.side(trace, summary.samples).wait_share == pytest.approx(wait_share, rel=0.05)

    assert "other" in text(summary) and "other work between iterations" in " ".join(text(summary).split())
    control = summarize(with_gaps(trace, -GAP_S))
    assert [worker.between_share for worker in control.workers] == pytest.approx([0.0] * 4, abs=1e-9)
    assert "other" not in text(control)


def test_compression_counts_in_the_total_everywhere(tmp_path):
    trace = record('name = "bsp"\n[compression]\nname = "sign"', updates=12, jitter=0.3)
    rows = trace.tables["pushes"]
    times = ("load_s", "compute_s", "wait_s", "comm_s", "encode_s")
    parts_s = np.array([[rows[name][rows["worker"] == w].sum() for name in times] for w in range(3)])
    shares = parts_s / parts_s.sum(axis=1)[:, None]
    assert (shares[:, 4] > 0.01).all()

    summary, found = summarize(trace), explain(trace)
    names = ("load", "compute", "wait", "comm", "between")
    in_summary = [[getattr(worker, f"{name}_share") for name in names] for worker in summary.workers]
    np.testing.assert_allclose(in_summary, shares, atol=1e-9)
    of_all = parts_s.sum(axis=0) / parts_s.sum()
    assert (summary.wait_share, summary.encode_share) == pytest.approx((of_all[2], of_all[4]))
    assert any("compression, steps of the optimizer" in line for line in sentences(found, None))
    drawn = waiting.shares(trace)
    np.testing.assert_allclose(
        drawn.loc["all", [f"{p}_share" for p in waiting.COLUMNS]].tolist(), of_all[:4], atol=1e-9
    )
    watched = live.RowTally(3)
    watched.add("pushes", rows)
    np.testing.assert_allclose(watched.shares.T, shares[:, :4], atol=1e-9)
    assert trace_pair.side(trace, summary.samples).wait_share == pytest.approx(of_all[2])


def test_work_of_a_script_between_its_pushes_is_no_wait():
    trace = record("ssp", jitter=0.3)
    before, rows = summarize(trace), trace.tables["pushes"].copy()
    for column in ("now_s", "begin_s", "end_s"):
        rows[column] += GAP_S * (rows["iteration"] - 1)
    gaps_s = GAP_S * (np.bincount(rows["worker"]) - 1)
    trace = with_rows(trace, "pushes", rows)
    times_s = np.array([rows[f"{part}_s"].sum() for part in PARTS])
    summary = summarize(trace)
    assert before.between_share == pytest.approx(0.0, abs=1e-9)
    assert summary.between_share == pytest.approx(gaps_s.sum() / (times_s.sum() + gaps_s.sum()))
    assert summary.wait_share == pytest.approx(times_s[2] / (times_s.sum() + gaps_s.sum()))
    np.testing.assert_allclose(explain(trace).between_s, gaps_s, atol=1e-9)
    assert "other work between iterations" in " ".join(text(summary).split())
    assert "other work between iterations" not in " ".join(text(before).split())


@pytest.mark.parametrize("paradigm", [{"name": "bsp"}, {"name": "ssp", "staleness": 1}])
def test_the_time_of_an_absence_does_not_count(tmp_path, paradigm):
    events = [
        {"worker": worker, "at_s": at_s + 0.05 * worker, "change": change}
        for worker in (0, 1)
        for at_s, change in ((2.0, "leave"), (4.0, "join"))
    ]
    trace = simulated(tmp_path, paradigm, [0.1, 0.2, 0.3], events=events)
    np.testing.assert_allclose(explain(trace).between_s, 0.0, atol=1e-9)
    control = Between(3)
    control.add(trace.tables["pushes"])
    assert control.seconds[0] > 1.5
    for flushes_s in ([1e9], [3.0, 1e9], np.arange(0.02, 20.0, 0.02)):  # then between departure and return, and often
        watched = live.RowTally(3)
        with TraceWriter(tmp_path / f"{len(flushes_s)}.h5", attributes(trace.job)) as file:
            file.observer = watched.add
            for begin_s, end_s in pairwise([0.0, *flushes_s]):
                for table in ("pushes", "membership"):
                    rows = trace.tables[table]
                    for row in rows[(rows["now_s"] > begin_s) & (rows["now_s"] <= end_s)].tolist():
                        file.append(table, row)
                file.flush()
        np.testing.assert_allclose(watched.between.seconds, 0.0, atol=1e-9)


def test_waits_within_the_computation_of_separated_layers_count_once():
    sizes = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
    layers = {"name": "stanza", "cut": "classifier", "fc_share": 0.5}
    trace = with_gaps(peer_recorder.record(layers, (1.0, 1.3), workload=sizes, samples=640))
    rows = trace.tables["exchanges"]
    assert (rows["end_s"] - rows["begin_s"] > rows["compute_s"] + GAP_S).any()
    found = Between(2)
    found.add(rows)
    np.testing.assert_allclose(found.seconds, GAP_S * (np.bincount(rows["worker"]) - 1), atol=1e-9)


def test_slices_add_up(trace):
    rows = trace.tables["exchanges"]
    whole, sliced = Between(4), Between(4)
    whole.add(rows)
    for begin in range(0, len(rows), 7):
        sliced.add(rows[begin : begin + 7])
    assert whole.seconds.tolist() == sliced.seconds.tolist() != [0.0] * 4


def test_an_average_counts_on_both_sides(trace):
    summary = summarize(trace)
    begun = [worker.exchanges for worker in summary.workers]
    taken = [worker.averages for worker in summary.workers]
    assert begun[1] == begun[3] == 0 < min(taken)
    assert taken[1] + taken[3] == taken[0] + taken[2] == begun[0] + begun[2] == summary.exchanges
    assert "averages" in text(summary) and "exchanges" not in text(summary)
    gossip = summarize(peer_recorder.record("pull"))
    assert {worker.averages for worker in gossip.workers} == {None}
    assert summarize(record("bsp", updates=4)).workers[0].between_share == pytest.approx(0.0, abs=1e-9)


def test_the_gaps_of_a_worker_are_summed_but_for_its_absence():
    rows = np.zeros(6, TABLES["exchanges"])
    rows["worker"], rows["iteration"] = [0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 1, 2]
    rows["begin_s"], rows["compute_s"], rows["batch_size"] = [0.0, 1.5, 10.25, 11.5, 0.0, 0.5], 1.0, 8
    rows["end_s"] = rows["begin_s"] + 1.0
    changes = np.zeros(2, TABLES["membership"])
    changes["now_s"], changes["change"] = [3.0, 10.0], [Change.LEFT, Change.JOINED]
    for order in (range(6), [3, 5, 1, 0, 4, 2]):
        between = Between(2)
        for change in changes:
            between.add_change(change)
        between.add(rows[list(order)])
        assert between.seconds.tolist() == [0.5 + 0.25, 0.0], "worker 1 begins before its last iteration has ended"
