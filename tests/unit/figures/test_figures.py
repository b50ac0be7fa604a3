"""Figures of small traces: three files each, with the values computed by hand in the CSV."""

import builtins
import dataclasses
import errno
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from click.testing import Result
from matplotlib.colors import to_rgb
from typer.testing import CliRunner

from hpcsync import figures
from hpcsync.cli.app import app
from hpcsync.config.overrides import KINDS
from hpcsync.figures import accuracy, leads, plotting, staleness, timeline
from hpcsync.figures.adaptive import steps_of_batches
from hpcsync.report import intervals
from hpcsync.report.summary import summarize
from hpcsync.trace.reader import load
from hpcsync.trace.schema import TABLES, Change, Phase
from hpcsync.trace.writer import TraceWriter
from tests.unit.html_report import pages
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import edit, record, with_rows, with_status

# By hand: pushes at 1, 2, 3 s (worker 0) and 2.5 s (worker 1) make the four updates; worker 1's at 5 s is dropped.
UNEVEN = ("asp", (1.0, 2.5), 4)
# By hand: rounds end at 2, 4 and 6 s; worker 0 waits from 1 to 2 s and from 3 to 4 s.
ROUNDS = ("bsp", (1.0, 2.0), 3)

SLOW_LINKS = ("cluster.network={bandwidth_gbit = 1e-5, latency_us = 10_000}",)
UNKNOWN = (math.nan, math.nan)  # norms of gradients


def run_attributes(trace):
    """Return the attributes that the writer does not set."""
    own = ("status", "format", "format_version")
    return {name: value for name, value in trace.attributes.items() if name not in own}


def write(folder, trace, name="run"):
    """Write a trace in memory to the folder of a run."""
    run = folder / name
    run.mkdir(parents=True)
    names = trace.tables["decisions"].dtype.names[len(TABLES["decisions"].names) :]
    fields = dict.fromkeys(names, ("", "An input."))
    with TraceWriter(run / "trace.h5", run_attributes(trace), fields) as writer:
        for table, rows in trace.tables.items():
            for row in rows.tolist():
                writer.append(table, row)
        writer.close(trace.status)
    return run


def with_job_changes(trace, **changes):
    job = trace.job.model_copy(update=changes)
    return dataclasses.replace(trace, attributes={**trace.attributes, "job": job.to_toml()})


def with_seed(trace, seed):
    return with_job_changes(trace, seed=seed)


def hpcsync(*arguments) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def draw(name, folder, *arguments, stem=None):
    """Run `hpcsync figure`; return the contents of its CSV."""
    out = folder / "figures"
    result = hpcsync("figure", name, *arguments, "--out", out / name)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    files = [out / f"{stem or name}.{kind}" for kind in ("png", "svg", "csv")]
    assert all(file.stat().st_size for file in files)
    assert result.stdout.splitlines()[-1].endswith(", ".join(map(str, files))) or stem
    return pd.read_csv(files[-1])


def counted(paradigm, seconds, updates):
    return record(paradigm, seconds, updates=updates)


def test_staleness_counts_applied_pushes_only(tmp_path):
    frame = draw("staleness", tmp_path, write(tmp_path, counted(*UNEVEN)))
    points = frame[frame["drawn"] == "point"]
    assert points["now_s"].tolist() == [1.0, 2.0, 2.5, 3.0]
    assert points["worker"].tolist() == [0, 0, 1, 0]
    assert points["staleness_updates"].tolist() == [0, 0, 2, 1]
    histogram = frame[frame["drawn"] == "histogram"]
    assert histogram[["staleness_updates", "bin_updates", "share"]].values.tolist() == [
        [0, 1, 0.5],
        [1, 1, 0.25],
        [2, 1, 0.25],
    ]
    means = frame[frame["drawn"] == "mean"]
    assert means[["now_s", "staleness_updates"]].values.tolist() == [[2.125, 0.75]]


def test_without_staleness_no_tick_lies_between_integers():
    (drawing,) = figures.draw("staleness", [counted(*ROUNDS)])
    axis = drawing.figure.axes[0]
    least, most = axis.get_ylim()
    ticks = [tick for tick in axis.get_yticks() if least <= tick <= most]
    assert ticks == [0, 1]


@pytest.mark.parametrize("name", ["staleness", "leads"])
def test_a_line_of_one_point_is_a_dot(name):
    def markers(trace):
        (drawing,) = figures.draw(name, [trace])
        return [line.get_marker() for line in drawing.figure.axes[0].lines if line.get_alpha() is None]

    assert "." in markers(counted(*UNEVEN))
    assert "." not in markers(counted("asp", (1.0, 2.5), 40))


def test_wide_histograms_have_bins_of_whole_updates():
    bars = staleness.histogram([pd.Series([0, 1, 2, 3, 119])])[["staleness_updates", "bin_updates", "share"]]
    assert bars["bin_updates"].unique().tolist() == [2]
    assert bars[bars["share"] > 0].values.tolist() == [[0.5, 2, 0.4], [2.5, 2, 0.4], [118.5, 2, 0.2]]


def test_leads_are_counted_from_all_pushes(tmp_path):
    frame = draw("leads", tmp_path, write(tmp_path, counted(*UNEVEN)))
    points = frame[frame["drawn"] == "point"]
    assert points["now_s"].tolist() == [1.0, 2.0, 2.5, 3.0, 5.0]
    assert points["push_gap_iters"].tolist() == [1, 2, 0, 2, 0]
    assert frame[frame["drawn"] == "largest"][["now_s", "push_gap_iters"]].values.tolist() == [[2.7, 2]]
    assert frame["bound_iters"].isna().all()


@pytest.mark.parametrize(
    ("paradigm", "bound_iters"),
    [
        ("bsp", 1),
        ("asp", None),
        ("ssp", 3),
        ('name = "ssp"\nstaleness = inf', None),
        ("dssp", 6),
        ("paper", None),
        ("easgd-sync", 1),
    ],
)
def test_the_bound_is_that_of_the_paradigm(paradigm, bound_iters):
    trace = record(paradigm, (1.0, 1.0, 5.0), updates=60)
    assert leads.push_lead_bound(trace.job.paradigm) == bound_iters
    largest = leads.Recount(trace).push_lead.max()
    assert largest > 6 if bound_iters is None else largest == bound_iters  # and the runs reach it, or exceed them all


def test_waiting_sums_each_worker_and_all(tmp_path):
    frame = draw("waiting", tmp_path, write(tmp_path, counted(*ROUNDS)))
    assert frame["worker"].tolist() == ["all", "0", "1"]
    seconds = frame[["compute_s", "wait_s", "comm_s"]].values
    assert seconds.tolist() == [[6.75, 2.0, 2.25], [2.25, 2.0, 0.75], [4.5, 0.0, 1.5]]
    shares = frame[["compute_share", "wait_share", "transfer_share"]].values
    assert np.allclose(shares, seconds / [[11.0], [5.0], [6.0]], rtol=1e-15)


def test_waiting_names_the_number_of_workers_shown(tmp_path):
    frame = draw("waiting", tmp_path, write(tmp_path, record("asp", (1.0,) * 9)), "--workers", 3)
    assert frame["worker"].tolist() == ["all", "0", "4", "8"]
    assert frame["trace"].unique().tolist() == ["ASP (3 of 9 workers)"]
    assert frame["compute_s"][0] == 0.75 * 48  # of all nine: five rounds, and three have begun the sixth at update 40


def test_timeline_draws_the_recorded_times(tmp_path):
    frame = draw("timeline", tmp_path, write(tmp_path, counted(*ROUNDS)), "--to", 10)
    bars = frame[frame["worker"] == 0][["activity", "iteration", "begin_s", "end_s"]].values.tolist()
    assert bars == [
        ["transfer", 1, 0.0, 0.125],
        ["compute", 1, 0.125, 0.875],
        ["transfer", 1, 0.875, 1.0],
        ["wait", 2, 1.0, 2.0],
        ["transfer", 2, 2.0, 2.125],
        ["compute", 2, 2.125, 2.875],
        ["transfer", 2, 2.875, 3.0],
        ["wait", 3, 3.0, 4.0],
        ["transfer", 3, 4.0, 4.125],
        ["compute", 3, 4.125, 4.875],
        ["transfer", 3, 4.875, 5.0],
    ]


def test_timeline_cuts_at_its_window(tmp_path):
    frame = draw("timeline", tmp_path, write(tmp_path, counted(*ROUNDS)), "--from", 1.5, "--to", 2.25)
    assert frame[["worker", "activity", "begin_s", "end_s"]].values.tolist() == [
        [0, "wait", 1.5, 2.0],
        [0, "transfer", 2.0, 2.125],
        [0, "compute", 2.125, 2.25],
        [1, "compute", 1.5, 1.75],
        [1, "transfer", 1.75, 2.0],
        [1, "transfer", 2.0, 2.25],
        [-1, "update", 2.0, 2.0],
    ]


def test_timeline_points_from_a_waiter_to_whom_it_waited_for():
    trace = counted(*ROUNDS)
    place = timeline.place_of(trace, 16)
    waits = timeline.waits_of(trace, place, 0.0, 10.0)
    assert list(waits[["until_s", "worker", "cause", "seconds"]].itertuples(index=False, name=None)) == [
        (2.0, 0, 1, 1.0),
        (4.0, 0, 1, 1.0),
        (6.0, 0, 1, 1.0),
    ]
    assert timeline.waits_of(trace, place, 3.0, 5.0)["until_s"].tolist() == [4.0]
    assert timeline.waits_of(trace, place, 0.0, 101.0).empty, "less than a hundredth of the window"
    assert timeline.waits_of(trace, timeline.place_of(trace, 1), 0.0, 10.0).empty, "a worker that is not shown"
    axis = timeline.plotting.panels(1, height=1.0)[1][0, 0]
    timeline.draw_waits(axis, waits, place)
    (arrows,) = axis.lines
    assert arrows.get_xdata().tolist() == [2.0, 4.0, 6.0]
    assert set(arrows.get_ydata().tolist()) == {0.6}, "the upper edge of worker 1"


@pytest.mark.parametrize(("events", "leaving"), [("[]", []), ('[{worker=0, change="leave", at_s=2.0}]', [0])])
def test_only_workers_that_the_job_makes_leave_are_marked(tmp_path, events, leaving):
    asp = ('paradigm={name="asp"}', "stop={updates=30}", f"cluster.events={events}")
    trace = load(pages.simulated(tmp_path, *asp) / "trace.h5")
    assert sorted(trace.frame("membership")["worker"]) == [0, 1, 2], "each has left, two of them or all at the end"
    marks = intervals.events(trace)
    assert marks.loc[marks["activity"] == "left", "worker"].tolist() == leaving


def test_timeline_draws_events_in_its_window_on_the_row_of_their_worker(tmp_path):
    trace = record("dssp", (1.0, 1.1, 3.7), updates=80, jitter=0.3)
    changes = [(1000, 5.0, 1, Change.DIED), (1001, 6.0, 1, Change.JOINED), (1002, 99.0, 0, Change.LEFT)]
    stalls = [(3.0, 2, 1, Phase.COMPUTING, 3.0, 2.5, 1), (40.0, 2, 9, Phase.COMPUTING, 3.0, 2.5, 1)]
    trace = with_rows(trace, "membership", np.array(changes, TABLES["membership"]))
    trace = with_rows(trace, "stalls", np.array(stalls, TABLES["stalls"]))
    (drawing,) = figures.draw("timeline", [trace], to_s=20.0)
    frame = drawing.data
    marks = frame[frame["activity"].isin(["died", "joined", "left", "stall"])]
    assert marks[["worker", "activity", "begin_s"]].values.tolist() == [
        [1, "died", 5.0],
        [1, "joined", 6.0],
        [2, "stall", 3.0],
    ]
    decisions = trace.tables["decisions"]
    early = decisions[decisions["now_s"] <= 20]
    assert 0 < len(early) < len(decisions)
    assert frame.loc[frame["activity"] == "decision", "worker"].tolist() == early["worker"].tolist()
    updates = frame[frame["activity"] == "update"]
    assert updates["iteration"].tolist() == [*range(1, len(updates) + 1)]
    assert len(updates) == (trace.tables["updates"]["now_s"] <= 20).sum()
    named = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert named == ["compute", "wait", "transfer", "died", "joined", "stall", "decision", "waited for"]
    rows = [label.get_text() for label in drawing.figure.axes[0].get_yticklabels()]
    assert rows == ["0", "1", "2", "servers"]
    (one,) = figures.draw("timeline", [trace], workers=1, to_s=20.0)
    assert set(one.data["worker"]) == {0, -1}  # events of workers that are not shown are not drawn


def test_a_switch_is_drawn_whichever_worker_brought_it_about():
    trace = record("dssp", (1.0, 1.1, 3.7), updates=80, jitter=0.3)
    rows = trace.tables["decisions"].copy()
    rows["controller"][0], rows["worker"][0] = b"switch", 2
    (drawing,) = figures.draw("timeline", [with_rows(trace, "decisions", rows)], workers=1, to_s=20.0)
    switches = drawing.data[drawing.data["activity"] == "switch"]
    assert switches[["worker", "begin_s"]].values.tolist() == [[intervals.SERVERS, rows["now_s"][0]]]


def two_pushes(begin_s):
    columns = ["worker", "iteration", "begin_s", "end_s", "wait_s", "pull_s", "comm_s", "encode_s", "load_s"]
    rows = [[0, 1, 0.25, 1.0, 0.125, 0.125, 0.25, 0.0, 0.0], [0, 2, begin_s, 3.0, 0.5, 0.25, 0.5, 0.0, 0.0]]
    return pd.DataFrame(rows, columns=columns)


def bars(begin_s):
    frame = intervals.bars(two_pushes(begin_s))
    return frame[["activity", "iteration", "begin_s", "end_s"]].values.tolist()


def test_transfers_are_drawn_before_and_after_the_computation():
    assert bars(2.0) == [
        ["wait", 1, 0.0, 0.125],
        ["transfer", 1, 0.125, 0.25],
        ["compute", 1, 0.25, 1.0],
        ["transfer", 1, 1.0, 1.125],  # then the wait, and white up to the reading
        ["wait", 2, 1.125, 1.625],
        ["transfer", 2, 1.75, 2.0],
        ["compute", 2, 2.0, 3.0],
        ["transfer", 2, 3.0, 3.25],
    ]


def test_a_small_push_after_its_compression_is_drawn_as_recorded():
    frame = two_pushes(2.0).assign(pull_s=[0.125, 0.375], comm_s=[0.1875, 0.4375], encode_s=[0.0625, 0.25])
    assert intervals.bars(frame)[["activity", "iteration", "begin_s", "end_s"]].values.tolist() == [
        ["wait", 1, 0.0, 0.125],
        ["transfer", 1, 0.125, 0.25],
        ["compute", 1, 0.25, 1.0],
        ["transfer", 1, 1.0625, 1.125],  # after the compression
        ["wait", 2, 1.125, 1.625],  # which ends with the grant; the read is the longer transfer
        ["transfer", 2, 1.625, 2.0],
        ["compute", 2, 2.0, 3.0],
        ["transfer", 2, 3.25, 3.3125],
    ]


def test_waits_end_with_their_grants(tmp_path):
    trace = load(pages.simulated(tmp_path, 'compression={name = "top-k", ratio = 0.05}', *SLOW_LINKS))
    frame = intervals.bars_of(trace, intervals.iterations(trace))
    waits, grants = frame[frame["activity"] == "wait"], trace.frame("grants")
    found = waits.merge(grants[grants["held_s"] > 0], on=["worker", "iteration"])
    assert len(found) > 100
    np.testing.assert_allclose(found["end_s"], found["now_s"] + 0.01, atol=1e-9)  # and the time of a message


def test_loading_is_drawn_before_the_computation():
    assert intervals.bars(two_pushes(2.0).assign(load_s=[0.0, 0.25])).values.tolist()[-3:-1] == [
        [0, "load", 2, 2.0, 2.25],
        [0, "compute", 2, 2.25, 3.0],
    ]


def test_transfers_that_do_not_fit_are_shortened_and_the_wait_is_not():
    put, wait, read = bars(1.6875)[3:6]  # 0.1875 s for two halves of 0.25 and 0.5 s
    assert (put, wait, read) == (
        ["transfer", 1, 1.0, 1.0625],
        ["wait", 2, 1.0625, 1.5625],
        ["transfer", 2, 1.5625, 1.6875],
    )


def test_accuracy_is_averaged_over_seeds_up_to_the_end_of_the_longest_run(tmp_path):
    runs = [
        write(tmp_path, with_seed(record("asp", (seconds,), updates=10), seed), f"seed{seed}")
        for seed, seconds in ((1, 2.0), (2, 3.0))
    ]
    frame = draw("accuracy", tmp_path, *runs)
    assert frame["trace"].unique().tolist() == ["ASP"]
    frame = frame[frame["quantity"] == "accuracy"]
    time = frame[frame["time_s"].notna()]
    line, dots = (time[time["drawn"] == drawn] for drawn in ("line", "dot"))
    # Accuracies 0.8 and 0.9 at 10 and 20 s, and at 15 and 30 s: both are known from 15 s on, the first ends at 20 s.
    expected = [[15, 0.825, 0.8, 0.85], [20, (0.9 + 0.8 + 0.1 / 3) / 2, 0.8 + 0.1 / 3, 0.9], [30, 0.9, 0.9, 0.9]]
    assert line["runs"].tolist() == [2, 2, 1]
    assert np.allclose(line[["time_s", "mean", "low", "high"]].values, expected, rtol=1e-15)
    assert dots[["time_s", "mean"]].values.tolist() == [[20, 0.9], [30, 0.9]]
    samples = frame[frame["samples"].notna() & (frame["drawn"] == "line")]
    assert samples[["samples", "mean", "low", "high"]].values.tolist() == [
        [40, 0.8, 0.8, 0.8],
        [80, 0.9, 0.9, 0.9],
    ]


def test_each_job_is_a_line_and_unknown_accuracies_are_left_out(tmp_path):
    bsp = record("bsp", updates=20)
    for row in range(len(bsp.tables["evaluations"])):
        bsp = edit(bsp, "evaluations", row, accuracy=math.nan)
    asp = dataclasses.replace(bsp, attributes=record("asp").attributes)
    frame = draw("accuracy", tmp_path, write(tmp_path, bsp, "bsp"), write(tmp_path, asp, "asp"))
    assert frame["trace"].unique().tolist() == ["BSP", "ASP"]
    assert frame["quantity"].unique().tolist() == ["loss"]


def test_controller_shows_every_decision(tmp_path):
    trace = record("dssp", (1.0, 1.1, 3.7), updates=80, jitter=0.3)
    frame = draw("controller", tmp_path, write(tmp_path, trace)).sort_values("now_s")
    decisions = trace.tables["decisions"]
    assert len(frame) == len(decisions) > 5
    for column, source in (("worker", "worker"), ("r_star_iters", "r_star"), ("credits_iters", "chosen")):
        assert frame[column].tolist() == decisions[source].tolist()
    assert (frame["r_star_iters"] > frame["credits_iters"]).any()  # s_U was reached: a stem was drawn


def test_controller_shows_no_decision_of_another_controller(tmp_path):
    trace = record("dssp", (1.0, 1.1, 3.7), updates=80, jitter=0.3)
    own = trace.tables["decisions"]
    others = own[:4].copy()
    others["controller"], others["chosen"] = b"batches", 48
    both = with_rows(trace, "decisions", np.concatenate([own, others]))
    frame = draw("controller", tmp_path, write(tmp_path, both))
    assert (len(frame), frame["credits_iters"].max()) == (len(own), own["chosen"].max())
    assert "no decision of DSSP's controller" in refused(
        "controller", write(tmp_path, with_rows(trace, "decisions", others), "o")
    )


def test_controllers_of_several_traces_are_several_figures(tmp_path):
    runs = [write(tmp_path, record(mode, (1.0, 3.0), updates=20), mode) for mode in ("dssp", "paper")]
    draw("controller", tmp_path, *runs, stem="controller-dssp-s-1-to-5")
    draw("controller", tmp_path, *runs, stem="controller-dssp-s-1-to-5-paper-mode")


def test_controllers_of_jobs_with_similar_names_are_several_files(tmp_path):
    runs = [
        write(tmp_path, with_job_changes(record("dssp", (1.0, 3.0), updates=20), name=name), name)
        for name in ("a.b", "a-b")
    ]
    assert hpcsync("figure", "controller", *runs, "--out", tmp_path / "figures" / "c.csv").exit_code == 0
    assert len([*(tmp_path / "figures").iterdir()]) == 2


def test_adaptive_shows_every_k_and_every_batch_size(tmp_path):
    trace = record("k-batches", (1.0, 1.1, 3.7), updates=80)
    frame = draw("adaptive", tmp_path, write(tmp_path, trace))
    decisions = trace.frame("decisions")
    chosen = decisions[decisions["controller"] == "k"]
    steps = frame[frame["k"].notna()]
    assert steps["k"].tolist() == [3, *chosen["chosen"], (chosen["chosen"].tolist() or [3])[-1]]
    given = decisions[decisions["controller"] == "batches"]
    assert len(given) > 0
    for worker in range(3):
        own = given.loc[given["worker"] == worker, "chosen"].tolist()
        assert frame.loc[frame["worker"] == worker, "batch_size"].tolist() == [8, *own, own[-1]]
    sums = frame[frame["worker"].notna()].groupby("now_s")["batch_size"].sum()
    assert sums.tolist() == [24] * len(sums)


def test_adaptive_shows_no_batches_of_workers_that_have_left():
    """Two that leave together are two allocations at one time; the first of them names the second worker."""
    steps = steps_of_batches(record("batches", (1.0, 1.0, 1.0, 1.0), leave={1: 5, 2: 5}))
    assert steps.groupby("worker")["batch_size"].last().tolist() == [16, 0, 0, 16]
    assert steps.groupby("now_s").tail(4).groupby("now_s")["batch_size"].sum().unique().tolist() == [32]


def test_adaptive_shows_k_alone_where_batches_are_equal(tmp_path):
    trace = record("adaptive", (1.0, 1.1, 3.7), updates=80)
    runs = write(tmp_path, trace, "min"), write(tmp_path, record("k-sync", updates=20), "fixed")
    frame = draw("adaptive", tmp_path, *runs)
    decisions = trace.tables["decisions"]
    mine = frame[frame["trace"] == "k-async, k by state and loss"]
    assert len(decisions) and mine["k"].tolist() == [1, *decisions["chosen"], decisions["chosen"][-1]]
    assert frame.loc[frame["trace"] == "k-sync, k = 2", "k"].tolist() == [2, 2]


def test_adaptive_refuses_runs_without_choices(tmp_path):
    run = write(tmp_path, record("ssp"))
    assert refused("adaptive", run).endswith("this run chooses neither k nor batch sizes, SSP, s = 2\n")


# ---- without servers ----


@pytest.fixture(scope="module")
def gossip():
    return peer_recorder.record("push-sum")


def test_consensus_is_that_of_the_evaluations(tmp_path, gossip):
    allreduce = peer_recorder.record("allreduce")
    frame = draw("consensus", tmp_path, write(tmp_path, gossip, "one"), write(tmp_path, allreduce, "two"))
    assert frame["trace"].unique().tolist() == ["gossip, push-sum, every 2", "all-reduce"]
    for name, trace in zip(frame["trace"].unique(), (gossip, allreduce), strict=True):
        shown, evaluations = frame[frame["trace"] == name], trace.tables["evaluations"]
        for column in ("now_s", "samples", "consensus_distance"):
            assert shown[column].tolist() == pytest.approx(evaluations[column].tolist(), rel=1e-14)


def test_consensus_of_workers_that_always_agree_can_be_drawn(tmp_path):
    assert not draw("consensus", tmp_path, write(tmp_path, peer_recorder.record("allreduce")))[
        "consensus_distance"
    ].any()


def test_the_common_weights_at_the_end_are_no_distance_of_seeds_that_train_on(tmp_path, gossip):
    short = edit(gossip, "evaluations", -1, consensus_distance=0.0)  # as local SGD ends with its last exchange
    apart = gossip.tables["evaluations"]["consensus_distance"]
    assert (apart > 0).all()
    frame = draw("consensus", tmp_path, write(tmp_path, short, "one"), write(tmp_path, gossip, "two"))
    assert frame["consensus_distance"].iloc[-1] == pytest.approx((apart[-2] + apart[-1]) / 2)
    alone = draw("consensus", tmp_path, write(tmp_path, short, "alone"))
    assert alone["consensus_distance"].tolist() == pytest.approx(apart[:-1].tolist(), rel=1e-14)


def test_unknown_distances_are_left_out(tmp_path, gossip):
    frame = draw("consensus", tmp_path, write(tmp_path, edit(gossip, "evaluations", 0, consensus_distance=math.nan)))
    assert len(frame) == len(gossip.tables["evaluations"]) - 1
    run = write(tmp_path, record("ssp"), "served")
    assert refused("consensus", run).endswith("no consensus distance in this run, SSP, s = 2\n")


def test_waiting_sums_exchanges(tmp_path):
    trace = peer_recorder.record("permutation")
    frame = draw("waiting", tmp_path, write(tmp_path, trace)).set_index("worker")
    rows = trace.tables["exchanges"]
    for column in ("compute_s", "wait_s", "comm_s"):
        assert frame[column]["all"] == pytest.approx(rows[column].sum(), rel=1e-12)
        assert frame[column]["1"] == pytest.approx(rows[column][rows["worker"] == 1].sum(), rel=1e-12)
    assert (frame[["wait_share", "transfer_share"]].loc["all"] > 0).all()


def test_timeline_draws_the_exchange_after_the_computation(tmp_path, gossip):
    # now_s w it peer bytes comp wait comm loss b begin end n weight load
    rows = [
        (2.0, 0, 1, 1, 8, 1.0, 0.5, 0.5, 1.0, 4, 0.0, 1.0, 1, 1.0, 0.0, math.nan, 0, *UNKNOWN),
        (4.5, 0, 2, -2, 0, 2.0, 0.0, 0.0, 1.0, 4, 2.5, 4.5, 0, 1.0, 0.0, math.nan, 0, *UNKNOWN),
        (5.0, 0, 3, 1, 8, 0.25, 0.0, 1.0, 1.0, 4, 4.5, 4.75, 1, 1.0, 0.0, math.nan, 0, *UNKNOWN),
        (6.0, 0, 4, 1, 8, 0.5, 0.0, 0.0, 1.0, 4, 5.0, 5.5, 1, 1.0, 0.0, math.nan, 0, *UNKNOWN),
        (9.0, 0, 4, -2, 0, 0.0, 0.0, 0.0, math.nan, 0, 9.0, 9.0, 1, 1.0, 0.0, math.nan, 0, *UNKNOWN),
    ]
    trace = with_rows(gossip, "exchanges", np.array(rows, TABLES["exchanges"]))
    frame = draw("timeline", tmp_path, write(tmp_path, trace), "--to", 20)
    assert frame[["activity", "iteration", "begin_s", "end_s"]].values.tolist() == [
        ["compute", 1, 0.0, 1.0],
        ["wait", 1, 1.0, 1.5],
        ["transfer", 1, 1.5, 2.0],
        ["compute", 2, 2.5, 4.5],
        ["compute", 3, 4.5, 4.75],
        ["transfer", 3, 4.75, 5.0],  # not over the next computation, beside which it went on
        ["compute", 4, 5.0, 5.5],
    ]


def test_timeline_draws_waits_across_the_cut_within_the_computation(tmp_path):
    layers = {"name": "stanza", "cut": "classifier", "fc_share": 0.5}
    sizes = {"name": "timing", "parameters": 10, "classifier": 5, "activations": 1}
    separated = peer_recorder.record(layers, (1.0, 1.0), workload=sizes, samples=8)
    # now_s w it peer bytes comp wait comm loss b begin end n weight load
    rows = [
        (4.0, 0, 1, -1, 8, 1.0, 2.5, 0.5, 1.0, 4, 0.0, 3.0, 0, 1.0, 0.0, math.nan, 0, *UNKNOWN),
        (5.0, 1, 1, 0, 8, 3.0, 1.25, 0.25, math.nan, 4, 0.0, 4.0, 0, 1.0, 0.0, math.nan, 0, *UNKNOWN),
    ]
    run = write(tmp_path, with_rows(separated, "exchanges", np.array(rows, TABLES["exchanges"])))
    frame = draw("timeline", tmp_path, run, "--to", 20)
    assert frame["trace"].unique().tolist() == ["Stanza, 1 fully-connected"]
    frame = frame[frame["activity"] != "left"]  # the membership of the run before its rows were replaced
    drawn = frame[["worker", "activity", "begin_s", "end_s"]].values.tolist()
    assert drawn == [
        [0, "wait", 0.0, 2.0],
        [0, "compute", 2.0, 3.0],
        [0, "wait", 3.0, 3.5],
        [0, "transfer", 3.5, 4.0],
        [1, "compute", 0.0, 1.0],  # a third of it: forward
        [1, "wait", 1.0, 2.0],
        [1, "compute", 2.0, 4.0],
        [1, "wait", 4.0, 4.25],
        [1, "transfer", 4.25, 4.5],
    ]


def test_accuracy_of_workers_with_weights_of_their_own(tmp_path):
    run = write(tmp_path, peer_recorder.record("local-sgd"))
    frame = draw("accuracy", tmp_path, run)
    assert frame["trace"].unique().tolist() == ["local SGD, 4 steps"]
    assert frame["quantity"].unique().tolist() == ["loss"]


@pytest.mark.parametrize("script", ["staleness", "leads", "controller"])
def test_figures_of_servers_refuse_runs_without_servers(script, tmp_path, gossip):
    run = write(tmp_path, gossip)
    what = "no decision of DSSP's controller" if script == "controller" else "no servers and no pushes"
    says = f"{run}/trace.h5: nothing to draw: {what} in this run, gossip, push-sum, every 2\n"
    assert refused(script, run) == says


@pytest.mark.parametrize("script", ["staleness", "leads", "controller", "consensus"])
def test_runs_without_what_a_figure_shows_are_left_out_with_a_note(script, gossip):
    served = record("dssp", (1.0, 1.1, 3.7), updates=40, jitter=0.3)
    mixed = [gossip, served]
    drawn, left_out = "DSSP, s = 1 to 5", "gossip, push-sum, every 2"
    part = {"controller": "decision of DSSP's controller"}.get(script, "servers and no pushes")
    if script == "consensus":
        drawn, left_out, part = left_out, drawn, "consensus distance"
    (drawing,) = figures.draw(script, mixed)
    assert drawing.notes == (f"{left_out}: 1 of 1 left out, no {part}",)
    assert set(drawing.data.get("trace", pd.Series(drawn))) == {drawn}
    assert figures.draw(script, mixed[::-1])[0].data.equals(drawing.data)


def test_names_of_paradigms():
    def name(**paradigm):
        return plotting.label(peer_recorder.record(paradigm, samples=8))

    assert name(name="gossip", mode="pull") == "gossip, pull"
    assert name(name="gossip", mode="permutation", topology="ring", period=3) == "gossip, permutation, ring, every 3"
    assert name(name="local-sgd", steps=5, outer_lr=0.7, outer_momentum=0.9) == "DiLoCo, 5 steps"
    colours = plotting.PARADIGM_COLOURS
    assert len(set(colours.values())) == len(colours)
    assert set(colours) == set(KINDS["paradigm"])


# ---- what all figures share ----


@pytest.mark.parametrize("script", ["timeline", "staleness"])
def test_the_same_traces_give_the_same_bytes(script, tmp_path):
    run = write(tmp_path, record("ssp", updates=20))
    other = write(tmp_path, record("ssp", (1.0, 1.4, 2.1), updates=20), "other")

    def figure(folder, run):
        draw(script, tmp_path / folder, run)
        return [(tmp_path / folder / "figures" / f"{script}.{kind}").read_bytes() for kind in ("png", "svg", "csv")]

    first = figure("one", run)
    assert figure("two", run) == first
    assert all(mine != others for mine, others in zip(first, figure("three", other), strict=True))


def test_thinning_keeps_few_rows_in_their_order():
    frame = pd.DataFrame({"n": range(10_000)})
    thin = plotting.thinned(frame)
    assert len(thin) == plotting.POINTS and thin["n"].is_monotonic_increasing and thin["n"].is_unique
    assert plotting.thinned(frame.head(7)).equals(frame.head(7))
    worker = np.arange(10_000) % 10  # every tenth row is one worker's: thinned, all are still there
    assert set(worker[thin["n"]]) == set(range(10))


def test_bins_keep_the_extremes():
    frame = pd.DataFrame({"now_s": np.arange(12_345.0), "y": np.zeros(12_345)})
    frame.loc[7_777, "y"] = 5.0
    bins = plotting.binned(frame, "y")
    assert len(bins) == 200 and bins["largest"].max() == 5 and bins["mean"].max() < 0.1


def test_labels_distinguish_traces_with_few_words(tmp_path):
    asp, dssp, paper = (record(paradigm) for paradigm in ("asp", "dssp", "paper"))
    assert plotting.labels([asp, dssp, paper]) == ["ASP", "DSSP, s = 1 to 5", "DSSP, s = 1 to 5, paper mode"]
    assert plotting.labels([asp, dssp, with_seed(asp, 7)]) == ["ASP, seed 0", "DSSP, s = 1 to 5", "ASP, seed 7"]
    assert plotting.labels([asp, record("bsp", (1.0,))]) == ["ASP, 3 workers", "BSP, 1 worker"]
    assert plotting.labels([with_status(asp, "failed")]) == ["ASP (failed)"]
    copies = [dataclasses.replace(asp, path=tmp_path / name / "trace.h5") for name in ("a", "b")]
    assert plotting.labels(copies) == ["ASP, a", "ASP, b"]


def test_traces_of_a_paradigm_share_a_colour_and_differ_in_dashes():
    looks = plotting.styles([record(paradigm) for paradigm in ("dssp", "bsp", "paper")])
    assert looks[0]["color"] == looks[2]["color"] != looks[1]["color"]
    assert looks[0]["linestyle"] != looks[2]["linestyle"]


# ---- bad input: one line that names the file, status 2 ----


def test_a_figure_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def full(figure, path, **how):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    run, file = write(tmp_path, record("bsp")), tmp_path / "waiting.svg"
    file.write_text("before")
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full)
    assert refused("waiting", run, "--out", file) == f"{file}: No space left on device\n"
    assert file.read_text() == "before" and sorted(tmp_path.iterdir()) == [run, file]


def refused(name, *arguments):
    result = hpcsync("figure", name, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("hpcsync: ")


@pytest.mark.parametrize("script", figures.FIGURES)
def test_bad_input_is_one_line_that_names_the_file(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no trace")
    run = write(tmp_path, record("bsp"))
    with TraceWriter(tmp_path / "rows.h5", run_attributes(record("bsp"))):
        pass
    assert refused(script, "missing") == "missing: no such file\n"
    assert refused(script, "notes.txt") == "notes.txt: not a trace (not an HDF5 file)\n"
    assert refused(script, run, run / "trace.h5") == f"{run}/trace.h5: given twice\n"
    assert refused(script, "rows.h5").startswith("rows.h5: nothing to draw")
    assert refused(script, tmp_path, run).endswith(f"{run}/trace.h5: given twice\n")  # of a folder with runs
    assert not (tmp_path / "figures").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    run = write(tmp_path, counted(*ROUNDS))
    assert str(run / "trace.h5") in refused("waiting", run, "--out", run / "trace.h5" / "f.png")


def test_an_empty_window_is_refused(tmp_path):
    run = write(tmp_path, counted(*ROUNDS))
    assert "nothing to draw in this window; the rows of the trace end at " in refused("timeline", run, "--from", 100)
    assert "--from and --to must be numbers" in refused("timeline", run, "--from", "nan")
    assert "--from and --to must be numbers" in refused("timeline", run, "--to", "inf")
    assert "--from 2: must be less than --to 1" in refused("timeline", run, "--from", 2, "--to", 1)


def test_a_window_after_the_last_computation_shows_the_last_transfers(tmp_path):
    run = load(pages.simulated(tmp_path, *SLOW_LINKS, "stop.updates=3") / "trace.h5")
    bars = intervals.bars_of(run, intervals.iterations(run))
    computed_s, end_s = bars["end_s"][bars["activity"] == "compute"].max(), bars["end_s"].max()
    assert computed_s < end_s
    (drawing,) = figures.draw("timeline", [run], from_s=computed_s)
    assert set(drawing.data["activity"]) <= {"transfer", "update"}
    assert drawing.figure.axes[0].get_xlim() == (computed_s, end_s)
    assert drawing.notes[0].startswith(f"BSP: {computed_s:.5f} to {end_s:.5f} s: 0 of 9 iterations drawn")


def test_controller_is_a_figure_of_dssp(tmp_path):
    run = write(tmp_path, record("ssp"))
    assert refused("controller", run).endswith("no decision of DSSP's controller in this run, SSP, s = 2\n")


def test_without_out_files_are_in_the_folder_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = hpcsync("figure", "waiting", write(tmp_path, counted(*ROUNDS)))
    assert result.stdout == "figures/waiting.png, figures/waiting.svg, figures/waiting.csv\n"
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"waiting.png", "waiting.svg", "waiting.csv"}


def test_the_suffix_of_out_is_the_kind_of_the_file(tmp_path):
    run, new = write(tmp_path, counted(*ROUNDS)), tmp_path / "new"
    for suffix, begin in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml"), (".csv", b"trace,")):
        file = new / f"share{suffix}"
        assert hpcsync("figure", "waiting", run, "--out", file).stdout == f"{file}\n"
        assert file.read_bytes().startswith(begin)
    assert len(list(new.iterdir())) == 4
    assert hpcsync("figure", "waiting", run, "--out", new).exit_code == 0  # a folder: named as the figure
    assert len(list(new.glob("waiting.*"))) == 3


def test_wrong_arguments_are_refused_in_one_line(tmp_path):
    run = write(tmp_path, counted(*ROUNDS))
    assert refused("acuracy", run).startswith("figure acuracy: unknown; must be one of accuracy, adaptive,")
    assert refused("accuracy").startswith("figure accuracy: RUN is missing")
    assert refused("accuracy", run, "--out", "x.jpeg").startswith("--out x.jpeg: must end in .png, .svg, .pdf or .csv")
    line = "figure accuracy: --from: must be left out; figures with this option: timeline\n"
    assert refused("accuracy", run, "--from", 1) == line
    assert "NAME is missing" in hpcsync("figure").stderr


def test_files_that_cannot_be_written_are_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    run = write(tmp_path, counted(*ROUNDS))
    monkeypatch.setattr(figures, "draw", lambda *_, **__: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "name", tmp_path / "file" / "name.png"):
        assert refused("accuracy", run, "--out", out) == f"{out.with_suffix(out.suffix or '.csv')}: Not a directory\n"


def test_figures_are_listed():
    lines = hpcsync("figure", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(figures.FIGURES)
    text = hpcsync("figure", "--help").stdout
    assert all(line in text for line in lines)
    modules = {path.stem for path in Path(plotting.__file__).parent.glob("*.py")} - {"__init__", "plotting"}
    assert modules == set(figures.FIGURES)


@pytest.mark.parametrize("package", figures.EXTRA)
def test_a_missing_package_is_one_line_with_the_command(package, tmp_path, monkeypatch):
    find = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return find(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith("hpcsync.figures.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    says = f"figure waiting: needs {package}, which is not installed: pip install matplotlib pandas\n"
    assert refused("waiting", write(tmp_path, counted(*ROUNDS))) == says


def test_settings_of_the_caller_are_kept(tmp_path):
    before = dict(matplotlib.rcParams)
    draw("waiting", tmp_path, write(tmp_path, counted(*ROUNDS)))
    assert dict(matplotlib.rcParams) == before


# ---- what a figure says of itself ----


def title(drawing):
    return drawing.figure.axes[0].get_title(loc="left")


def test_names_of_folders_are_no_formulas(tmp_path):
    runs = [write(tmp_path, counted(*ROUNDS), name) for name in ("a$^$b", "c")]
    draw("timeline", tmp_path, *runs)
    svg = (tmp_path / "figures" / "timeline.svg").read_text()
    assert "a$^$b" in svg


def test_timeline_says_what_it_leaves_out(tmp_path):
    trace = counted(*ROUNDS)  # three rounds of two workers; the last computation ends at 6 s
    (whole,) = figures.draw("timeline", [trace], to_s=6.0)
    (part,) = figures.draw("timeline", [trace], from_s=1.5, to_s=2.25)
    (one,) = figures.draw("timeline", [trace], workers=1, to_s=6.0)
    axes = [drawing.figure.axes[0].get_title(loc="right") for drawing in (whole, part, one)]
    assert axes == ["", "2 of 6 iterations drawn", "3 of 6 iterations, 1 of 2 workers drawn"]
    assert (title(whole), whole.notes) == ("BSP", ())
    line = "BSP: 1.5 to 2.25 s: 2 of 6 iterations drawn; --from, --to and --workers choose the part"
    assert part.notes == (line,)
    arguments = ["--from", 1.5, "--to", 2.25, "--out", tmp_path / "a.png"]
    assert hpcsync("figure", "timeline", write(tmp_path, trace), *arguments).stdout.splitlines()[0] == line


@pytest.mark.parametrize(
    ("from_s", "to_s", "words"), [(0.0, 0.354187, "0 to 0.3542"), (1e5, 1e5 + 1.5, "100,000 to 100,001.5")]
)
def test_the_window_of_a_timeline_is_told_as_exactly_as_it_is_wide(from_s, to_s, words):
    assert " to ".join(timeline.seconds(at_s, to_s - from_s) for at_s in (from_s, to_s)) == words


def test_timeline_says_how_many_updates_it_leaves_out(monkeypatch):
    monkeypatch.setattr(timeline, "MARKS", 2)
    (drawing,) = figures.draw("timeline", [counted(*ROUNDS)], to_s=6.0)
    assert drawing.figure.axes[0].get_title(loc="right") == "2 of 3 updates before 6 s drawn"
    assert (drawing.data["activity"] == "update").sum() == 2


def lightness(colour):
    """Return L* of the grey that a colour is printed as."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def smallest_step(colours):
    return np.diff(sorted(map(lightness, [*colours, "white"]))).min()


def test_activities_differ_in_grey():
    assert smallest_step(plotting.ACTIVITY_COLOURS.values()) > 15
    assert smallest_step(["#009E73", "#56B4E9", "#E69F00", "#000000"]) < 5  # control: colours that a grey print mixes


def with_target(trace, **targets):
    return with_job_changes(trace, stop=trace.job.stop.model_copy(update=targets))


def test_accuracy_marks_when_each_run_reached_the_target(tmp_path):
    runs = [with_seed(record("asp", (seconds,), updates=20), seed) for seed, seconds in ((1, 2.0), (2, 3.0))]
    reaching = [with_target(trace, target_accuracy=0.85) for trace in runs]
    drawn = accuracy.draw(reaching)[0]
    marks = drawn.data[(drawn.data["drawn"] == "target") & drawn.data["time_s"].notna()]
    times_s = [summarize(trace).time_to_target_s for trace in reaching]
    assert marks["time_s"].tolist() == times_s == [20.0, 30.0]  # the second evaluation, not the last
    assert marks["quantity"].unique().tolist() == ["accuracy"]
    assert "circles: target reached" in drawn.figure.legends[0].get_title().get_text()
    circles = [line for axis in drawn.figure.axes for line in axis.lines if line.get_marker() == "o"]
    assert circles and not any(line.get_clip_on() for line in circles), "whole at the upper end of an axis"
    (never,) = accuracy.draw([with_target(trace, target_accuracy=0.99999) for trace in runs])
    assert not (never.data["drawn"] == "target").any()
    assert "circles" not in never.figure.legends[0].get_title().get_text()
    shortest = "mean and range of 2 seeds, thin: some have ended"
    assert shortest in never.figure.legends[0].get_title().get_text()
