"""Numbers of a summary, on a trace that is small enough to compute them by hand."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from hpcsync.audit.server_recount import Recount
from hpcsync.config.cluster import ClusterEvent
from hpcsync.config.predicted import Prediction
from hpcsync.paradigms.records import NO_PEER, Problem
from hpcsync.report.aggregate import Tally, begins_allocation
from hpcsync.report.summary import Death, beside_prediction, summarize, table
from hpcsync.trace import reader, schema
from hpcsync.trace.reader import TraceError
from hpcsync.trace.writer import TraceWriter
from tests.unit.recorder import Recorder
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import (
    PARADIGMS,
    as_trace,
    attributes,
    edit,
    job_of,
    play,
    record,
    remove,
    with_rows,
    with_status,
)

#        seq now_s w it vr st begin end  comp wait comm  b ls loss bytes share predicted pull encode load weight outcome
NAN, INF = math.nan, math.inf
PUSHES = [
    (1, 1.0, 0, 1, 0, 0, 0.0, 0.75, 0.75, 0.0, 0.25, 8, 1, 2.0, 100, 1.0, NAN, NAN, NAN, 0.0, 0.0, NAN, 0, 1.0, 0),
    (3, 2.0, 0, 2, 1, 0, 1.0, 1.75, 0.75, 0.0, 0.25, 8, 1, 1.5, 100, 1.0, NAN, NAN, NAN, 0.0, 0.0, NAN, 0, 1.0, 0),
    (4, 2.5, 1, 1, 0, 2, 0.0, 2.0, 2.0, 0.0, 0.5, 8, 1, 1.8, 100, 1.0, NAN, NAN, NAN, 0.0, 0.0, NAN, 0, 1.0, 0),
    (7, 4.0, 0, 3, 3, 0, 2.5, 3.25, 0.75, 0.5, 0.75, 8, 1, 1.2, 100, 1.0, NAN, NAN, NAN, 0.0, 0.0, NAN, 0, 1.0, 0),
    (9, 5.0, 1, 2, 3, 1, 2.5, 4.5, 2.0, 0.0, 0.5, 8, 1, 1.1, 100, 1.0, NAN, NAN, NAN, 0.0, 0.0, NAN, 0, 0.0, 1),
]
#         seq now_s w it v gap credits held first b ls commit ratio
GRANTS = [
    (2, 1.0, 0, 2, 1, 1, 0, 0.0, -1, 8, 1, INF, NAN, -1),
    (5, 2.5, 0, 3, 3, 1, 0, 0.5, -1, 8, 1, INF, NAN, -1),
    (6, 2.5, 1, 2, 3, 0, 0, 0.0, -1, 8, 1, INF, NAN, -1),
    (8, 4.0, 0, 4, 4, 2, 0, 0.0, -1, 0, 0, INF, NAN, -1),
    (10, 5.0, 1, 3, 4, 0, 0, 0.0, -1, 0, 0, INF, NAN, -1),
]
UPDATES = [(1, 1.0, 1, 0.1, 8), (2, 2.0, 1, 0.1, 16), (3, 2.5, 1, 0.1, 24), (4, 4.0, 1, 0.1, 32)]
EVALUATIONS = [
    (0.0, 0, 0, 2.3, 0.1, math.nan),
    (2.0, 2, 16, 0.4, 0.9, math.nan),
    (2.5, 3, 24, 0.5, 0.95, math.nan),
    (5.0, 4, 32, 0.6, 0.93, math.nan),
]


def trace(paradigm='name = "ssp"\nstaleness = 1', target="", evaluations=EVALUATIONS, tables=True):
    named = {"pushes": PUSHES, "grants": GRANTS, "updates": UPDATES} if tables else {}
    rows = [(name, row) for name, rows in {**named, "evaluations": evaluations}.items() for row in rows]
    return as_trace(job_of(paradigm, 2, target=target), rows)


def test_the_run():
    summary = summarize(trace())
    assert (summary.name, summary.paradigm, summary.status) == ("made-up", "ssp", "finished")
    assert (summary.engine, summary.n_servers, summary.n_workers) == ("simulator", 1, 2)
    assert (summary.duration_s, summary.updates, summary.samples) == (5.0, 4, 32)
    assert summary.samples_per_s == 32 / 5.0
    assert (summary.iterations, summary.pushes, summary.dropped, summary.wire_bytes) == (5, 5, 1, 500)
    assert summary.exchanges is summary.consensus_distance is None
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 2)
    assert summary.wait_share == 0.5 / 9.0
    assert (summary.start_gap_max_iters, summary.push_gap_max_iters) == (1, 2)
    assert (summary.final_accuracy, summary.best_accuracy) == (0.93, 0.95)
    assert (summary.final_loss, summary.best_loss) == (0.6, 0.4)
    assert summary.tracing_overhead_s == 0.0


def test_the_workers():
    first, second = summarize(trace()).workers
    assert (first.worker, first.pushes, first.dropped) == (0, 3, 0)
    assert first.compute_share == pytest.approx(2.25 / 4.0)
    assert first.wait_share == pytest.approx(0.5 / 4.0)
    assert first.comm_share == pytest.approx(1.25 / 4.0)
    assert (first.staleness_mean, first.staleness_max) == (0.0, 0)
    # The stop grant starts nothing: its gap of 2 is no start lead.
    assert (first.start_gap_max_iters, first.push_gap_max_iters) == (1, 2)
    assert (second.worker, second.pushes, second.dropped) == (1, 2, 1)
    assert (second.compute_share, second.wait_share, second.comm_share) == (0.8, 0.0, 0.2)
    # The dropped push has no say.
    assert (second.staleness_mean, second.staleness_max) == (2.0, 2)
    assert (second.start_gap_max_iters, second.push_gap_max_iters) == (0, 0)


@pytest.mark.parametrize(
    ("target", "words", "time_s"),
    [
        ("", None, None),
        ("target_accuracy = 0.9", "accuracy 0.9", 2.0),
        ("target_accuracy = 0.94", "accuracy 0.94", 2.5),
        ("target_accuracy = 0.99", "accuracy 0.99", None),
        ("target_loss = 0.5", "loss 0.5", 2.0),
        ("target_loss = 0.4", "loss 0.4", 2.0),
        ("target_accuracy = 0.9\ntarget_loss = 0.1", "accuracy 0.9 or loss 0.1", 2.0),
        ("target_accuracy = 0.94\ntarget_loss = 0.45", "accuracy 0.94 or loss 0.45", 2.0),
    ],
)
def test_time_to_target(target, words, time_s):
    summary = summarize(trace(target=target))
    assert (summary.target, summary.time_to_target_s) == (words, time_s)


@pytest.mark.parametrize(
    ("known", "time_s", "words"),
    [
        ({}, None, "2.00 s to the target; it did not reach it"),
        ({"low_s": 1, "high_s": 3}, 3.0, "2.00 s to the target (1.00 to 3.00 s, 80 %); it took 1.50 times as long"),
        (
            {"samples_per_s": 4},
            1.0,
            "2.00 s to the target; it took 0.50 times as long and trained 1.60 times as many samples per second",
        ),
    ],
)
def test_a_prediction_is_what_the_run_is_compared_with(known, time_s, words):
    update = {"predicted": Prediction(seconds=2.0, **known), "time_to_target_s": time_s}
    assert beside_prediction(summarize(trace()).model_copy(update=update)) == words


CELLS = {"load": 0.11, "compute": 0.22, "wait": 0.33, "comm": 0.14, "between": 0.2}
NUMBERS = {"iterations": 9, "pushes": 8, "dropped": 7, "wire_bytes": 6_000, "staleness_mean": 1.5, "staleness_max": 4}
PLAN = {"start_gap_max_iters": 3, "push_gap_max_iters": 2, "local_steps": 5, "data_share": 0.4, "ratio": 0.05}
OF_TIME = "11.0 % 22.0 % 33.0 % 14.0 %"


@pytest.mark.parametrize(
    ("update", "head", "row"),
    [
        (
            {},
            "start push worker pushes dropped load compute wait comm staleness lead lead",
            f"0 8 7 {OF_TIME} 1.50 (4) 3 2",
        ),
        (
            {"coarse_s": 1.0},
            "of worker pushes load compute wait comm staleness steps data sent",
            f"0 8 {OF_TIME} 1.50 (4) 5 40.0 % 5.0 %",
        ),
        (
            {"exchanges": 1},
            "worker iterations exchanges load compute wait comm other kB moved",
            f"0 9 1 {OF_TIME} 20.0 % 6",
        ),
    ],
)
def test_each_column_shows_its_number(update, head, row):
    shares = {f"{part}_share": share for part, share in CELLS.items()}
    summary = summarize(trace())
    worker = summary.workers[0].model_copy(update={**shares, **NUMBERS, **PLAN, "exchanges": 1})
    words = " ".join(text(summary.model_copy(update={"workers": (worker,), **update})).split())
    assert f"{head} {row}" in words


def test_five_deaths_and_three_events_are_all_named():
    summary = summarize(trace())
    death = Death(worker=1, now_s=2.0, left=1)
    shown = text(summary.model_copy(update={"deaths": (death,) * 5, "events_missed": ("a", "b", "c"), "events": 3}))
    assert "more" not in shown
    assert "worker 1 after 2.00 s" in shown and "run ended: a; b; c" in " ".join(shown.split())


def test_what_is_said_elsewhere_has_no_second_line():
    summary = summarize(trace())
    assert "0.6 at the end" not in text(summary.model_copy(update={"diverged_at": 3}))
    peers = summarize(peer_recorder.record("pull")).model_copy(update={"between_share": 0.5})
    assert "of the workers' time" not in text(peers)


def test_loading_has_a_column_from_a_hundredth_of_the_time_on():
    summary = summarize(trace())
    load = summary.workers[0].model_copy(update={"load_share": 0.01})
    assert " load " in text(summary.model_copy(update={"workers": (load,)}))
    assert " load " not in text(summary)


def test_unknown_fields_are_none():
    summary = summarize(trace(evaluations=[(1.0, 1, 8, math.nan, math.nan, math.nan)]))
    assert summary.final_loss is summary.best_loss is summary.final_accuracy is summary.best_accuracy is None


LOST, SKIPPED = Problem.LOSS_NOT_FINITE, Problem.SKIPPED


@pytest.mark.parametrize(
    ("problems", "losses", "diverged_at"),
    [
        ((0, 0, LOST, SKIPPED, LOST), (2.3, 0.4, INF, NAN), 3),  # handled at 2.5 s, with update 3
        ((LOST,) * 5, (NAN,) * 4, 1),
        ((0, LOST, LOST, 0, 0), (2.3, NAN, 0.4, 0.5), None),  # it has recovered
        ((0,) * 5, (2.3, 0.4, NAN, NAN), 3),  # no worker computes a loss: by the evaluation of version 3
        ((0,) * 5, (NAN,) * 4, None),  # the evaluation has no loss
        ((0,) * 5, (2.3, 0.4, 0.5, 0.6), None),
    ],
)
def test_a_run_that_diverges_is_told(problems, losses, diverged_at, monkeypatch):
    rows = [(*row[:3], loss, *row[4:]) for row, loss in zip(EVALUATIONS, losses, strict=True)]
    run = trace(evaluations=rows)
    pushes = run.tables["pushes"].copy()
    pushes["problem"] = problems
    summary = summarize(with_rows(run, "pushes", pushes))
    assert summary.diverged_at == diverged_at
    with monkeypatch.context() as patched:
        patched.setattr(reader.Trace, "slices", lambda run, table: np.array_split(run.tables[table], 9))
        assert summarize(with_rows(run, "pushes", pushes)).diverged_at == diverged_at
    assert summary.final_loss == (losses[-1] if math.isfinite(losses[-1]) else None)
    row = re.search("loss .*", text(summary))
    if diverged_at is not None:
        best = ", best 0.4 before" if math.isfinite(losses[0]) else ""
        assert row[0].split() == f"loss not finite since update {diverged_at}{best}".split()
    else:
        assert row is None if summary.final_loss is None else "at the end" in row[0]


def test_models_that_arrive_after_the_end_are_no_sign_of_recovery():
    run = peer_recorder.record("push")
    rows = run.tables["exchanges"].copy()
    assert rows["batch_size"][-1] == 0
    rows["problem"][rows["batch_size"] > 0] = LOST
    assert summarize(with_rows(run, "exchanges", rows)).diverged_at == 1


def test_empty_run():
    summary = summarize(trace(tables=False, evaluations=[]))
    assert (summary.duration_s, summary.samples_per_s, summary.staleness_mean) == (0.0, None, None)
    assert [worker.wait_share for worker in summary.workers] == [None, None]
    assert text(summary)


def test_summary_is_json():
    summary = summarize(trace(target="target_accuracy = 0.9"))
    read_back = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert read_back["time_to_target_s"] == 2.0
    assert read_back["workers"][1]["staleness_mean"] == 2.0
    assert type(summary).model_validate_json(json.dumps(read_back)) == summary


def text(summary):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table(summary))
    return capture.get()


def test_table():
    shown = text(summarize(trace(target="target_accuracy = 0.9")))
    for words in ("made-up", "ssp", "2 workers", "accuracy 0.9 after 2.00 s", "4 updates, 32 samples", "12.5 %", "(2)"):
        assert words in shown
    assert "not reached" in text(summarize(trace(target="target_accuracy = 0.99")))


def test_one_of_a_kind_is_singular():
    one = {"n_workers": 1, "n_servers": 1, "updates": 1, "samples": 1, "dropped": 1, "k_last": 1}
    shown = " ".join(text(summarize(trace()).model_copy(update=one)).split())
    for words in ("1 server, 1 worker ", "1 update, 1 sample ", "1 contribution "):
        assert words in shown


@pytest.mark.parametrize(("choice", "words"), [("worker", ""), ("mean", " (mean of the workers' buffers)")])
def test_the_table_names_the_buffers_that_were_evaluated(choice, words):
    summary = summarize(trace())
    assert summary.buffers == "worker"
    lines = text(summary.model_copy(update={"buffers": choice})).splitlines()
    assert next(line for line in lines if line.startswith("accuracy")).rstrip().endswith(f"best 0.95{words}")


@pytest.mark.parametrize("load_share", [0.0, 0.1])
def test_the_table_fits_80_columns(load_share):
    summary = summarize(with_status(trace(target="target_accuracy = 0.9\ntarget_loss = 0.001"), "interrupted"))
    large = {"pushes": 999_999, "dropped": 9_999, "staleness_mean": 127.25, "staleness_max": 1024}
    large["load_share"] = load_share
    workers = tuple(worker.model_copy(update={**large, "start_gap_max_iters": 1000}) for worker in summary.workers)
    shown = text(summary.model_copy(update={"workers": workers, "samples": 10**9}))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "127.25 (1024)" in shown


@pytest.mark.parametrize("paradigm", ["adsp", "ashl"])
def test_the_table_of_a_million_commits_with_loading_fits_80_columns(paradigm):
    summary = summarize(record(paradigm, jitter=0.3, updates=60))
    large = {"pushes": 999_999, "dropped": 9_999, "staleness_mean": 127.25, "staleness_max": 1024}
    large |= {"start_gap_max_iters": 1000, "push_gap_max_iters": 1000, "local_steps": 1000}
    large |= dict.fromkeys(("load_share", "wait_share", "comm_share"), 0.1)
    large |= dict.fromkeys(("compute_share", "data_share", "ratio"), 1.0)
    workers = tuple(worker.model_copy(update=large) for worker in summary.workers)
    shown = text(summary.model_copy(update={"workers": workers}))
    row = "0 999,999 9,999" if paradigm == "adsp" else "0 999,999"
    row += " 10.0 % 100.0 % 10.0 % 10.0 % 127.25 (1024)"
    row += " 1000 1000" if paradigm == "adsp" else " 1,000 100.0 % 100.0 %"
    assert row in [" ".join(line.split()) for line in shown.splitlines()]
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_numbers_of_a_summary_are_consistent(paradigm):
    summary = summarize(record(paradigm, jitter=0.5, leave={1: 5}))
    assert sum(worker.pushes for worker in summary.workers) == summary.pushes
    assert sum(worker.dropped for worker in summary.workers) == summary.dropped
    for worker in summary.workers:
        rest = worker.between_share  # compression
        assert worker.compute_share + worker.wait_share + worker.comm_share + rest == pytest.approx(1.0)


def test_shares_are_of_the_time_to_the_last_iteration_and_the_table_says_so():
    """Under SSP the fast worker waits for the end of the run, which is in none of its shares."""
    played = record("ssp", (0.1, 3.0), updates=8)
    tally, pushes = Tally(played), played.tables["pushes"]
    known_s = sum(tally.parts_s.values()) + tally.between.seconds
    last_s = [pushes["now_s"][pushes["worker"] == worker].max() for worker in range(2)]
    assert known_s == pytest.approx(last_s) and last_s[0] < last_s[1] == tally.duration_s
    said = "shares: of the time to a worker's last iteration, not to the run's end"
    for each in (played, peer_recorder.record("pull")):
        assert said in text(summarize(each)).splitlines(), "a narrow table does not break it"


def test_table_shows_the_extremes_of_many_workers():
    summary = summarize(trace())
    one = summary.workers[0]
    workers = tuple(
        one.model_copy(update={"worker": w, "wait_share": (w * 37 % 100) / 100, "pushes": 5000 + w}) for w in range(100)
    )
    shown = text(summary.model_copy(update={"workers": workers})).splitlines()
    numbers = [line.split()[0] for line in shown if line[:1].isdigit()]
    assert len(numbers) == 20
    waited = sorted(range(100), key=lambda w: w * 37 % 100)
    assert [int(number) for number in numbers] == waited[:10] + waited[-10:]
    assert any("waited least and most" in line for line in shown)
    assert len([line for line in text(summary).splitlines() if line[:1].isdigit()]) == 2


def test_rows_count_for_their_worker():
    summary = summarize(record("asp", (1.0, 1.3, 2.1, 0.7, 0.9), jitter=0.5, leave={1: 5}))
    pushes = record("asp", (1.0, 1.3, 2.1, 0.7, 0.9), jitter=0.5, leave={1: 5}).tables["pushes"]
    assert [w.pushes for w in summary.workers] == [int((pushes["worker"] == w).sum()) for w in range(5)]


# ---- k, batch sizes, and what was computed in vain -----------------------------------------------------------------


def drops(trace):
    summary = summarize(trace)
    return summary.late, summary.discarded, summary.cancelled, summary.dropped


def test_reasons_of_drops():
    seconds, k_sync = (1.0, 1.3, 2.1, 3.7), 'name = "k-sync"\nk = 2\ncancel = '
    for paradigm, reasons in ((k_sync + '"drop"', {"late"}), (k_sync + '"abort"', {"late", "cancelled"})):
        trace = record(paradigm, seconds, jitter=0.2)
        pushes, summary = trace.tables["pushes"], summarize(trace)
        dropped = pushes[pushes["outcome"] == 1]
        at_the_end = int((dropped["version_read"] + dropped["staleness"] == 40)[dropped["share"] == 1].sum())
        assert summary.discarded is None
        assert summary.cancelled == (dropped["share"] < 1).sum()
        assert (summary.cancelled > 0) == ("cancelled" in reasons)
        assert summary.late + summary.cancelled + at_the_end == summary.dropped == len(dropped)
        computed = pushes["share"] * 8
        assert summary.dropped_share == pytest.approx(computed[pushes["outcome"] == 1].sum() / computed.sum())
    discarding = record('name = "k-async"\nk = 2\nstaleness_max = 1', seconds)
    late, discarded, cancelled, dropped = drops(discarding)
    assert late is cancelled is None
    assert 5 < discarded <= dropped
    assert drops(record('name = "k-async"\nk = 2', seconds))[1] == 0
    assert drops(record("ssp"))[:3] == (None, None, None)


def test_a_cancelled_share_of_a_batch_counts_as_dropped():
    dropped = trace()
    assert summarize(dropped).dropped_share == 1 / 5
    assert summarize(edit(dropped, "pushes", 4, share=0.5)).dropped_share == 0.5 / 4.5
    assert summarize(trace(tables=False)).dropped_share is None


def test_k_last_least_and_most():
    adaptive = record('name = "k-sync"\nk = "state"', (1.0, 1.1, 3.0, 3.2), updates=100)
    chosen = adaptive.tables["decisions"]["chosen"]
    summary = summarize(adaptive)
    assert (summary.k_last, summary.k_least, summary.k_most) == (chosen[-1], min(chosen), 4)
    assert f"{summary.k_last} at the end, from {summary.k_least} to 4" in text(summary)
    fixed = summarize(record('name = "k-sync"\nk = 2'))
    assert (fixed.k_last, fixed.k_least, fixed.k_most) == (2, 2, 2)
    assert "at the end, from" not in text(fixed)
    assert summarize(trace()).k_last is None


def test_deaths():
    """A worker that has left does not count as remaining; one that joins again does."""
    changes = [
        (11, 1.5, 2, schema.Change.DIED),
        (12, 2.0, 0, schema.Change.LEFT),
        (13, 2.5, 0, schema.Change.JOINED),
        (14, 3.25, 1, schema.Change.DIED),
        (15, 5.0, 0, schema.Change.LEFT),
    ]
    rows = [("pushes", PUSHES[0]), *(("membership", row) for row in changes)]
    summary = summarize(as_trace(job_of('name = "asp"', 4), rows))
    assert [(d.worker, d.now_s, d.left) for d in summary.deaths] == [(2, 1.5, 3), (1, 3.25, 2)]
    assert "died      worker 2 after 1.50 s (3 left), worker 1 after 3.25 s (2 left)\n" in text(summary)
    assert "died" not in text(summary.model_copy(update={"deaths": ()}))
    many = text(summary.model_copy(update={"deaths": summary.deaths * 4}))
    assert "and 3 more (2 left)" in many and max(map(len, many.splitlines())) <= 80


def test_the_last_batch_sizes():
    uneven = record("batches", (1.0, 1.3, 2.1), jitter=0.4)
    sizes = [worker.batch_size for worker in summarize(uneven).workers]
    assert sizes == [
        uneven.tables["decisions"]["chosen"][uneven.tables["decisions"]["worker"] == w][-1] for w in range(3)
    ]
    assert sum(sizes) == 24
    assert f"{sizes[0]}, {sizes[1]}, {sizes[2]} samples at the end" in text(summarize(uneven))
    assert [worker.batch_size for worker in summarize(record("batches", updates=1)).workers] == [8, 8, 8]
    assert [worker.batch_size for worker in summarize(trace()).workers] == [None, None]
    together = record("batches", (1.0, 1.0, 1.0, 1.0), leave={1: 5, 2: 5})  # after the first of them has left, too
    assert [worker.batch_size for worker in summarize(together).workers] == [16, None, None, 16]


def test_an_allocation_is_one_row_for_every_worker_in_order():
    seq, worker = np.array([1, 2, 3, 4, 6, 7]), np.array([0, 1, 1, 0, 1, 2])
    assert begins_allocation(seq, worker).tolist() == [True, False, True, True, True, False]
    assert begins_allocation(seq, worker, (0, -1)).tolist() == [False, False, True, True, True, False]


def test_reasons_of_drops_fit_into_the_table():
    summary = summarize(record('name = "k-sync"\nk = 2\ncancel = "abort"', (1.0, 1.3, 2.1, 3.7), jitter=0.2))
    shown = text(summary)
    for words in ("k         2\n", f"{summary.dropped} contributions", "% of all samples", "late", "cancelled"):
        assert words in shown.replace(" \n", "\n") or words.strip() in shown
    many = {"dropped": 9_999_999, "late": 5_000_000, "cancelled": 4_000_000}
    assert max(map(len, text(summary.model_copy(update=many)).splitlines())) <= 80
    assert ", 999,999 at the end" in " ".join(text(summary.model_copy(update=many)).split())
    assert "dropped   0 contributions\n" in re.sub(
        " +\n", "\n", text(summarize(record('name = "k-async"\nk = 3', die_s=2.2)))
    )


# ---- from slices, and against an independent count -------------------------------------------------------------------

HOWS = [
    {"jitter": 0.5},
    {"leave": {2: 4}},
    {"leave": {0: 5, 1: 3}},
    {"leave": {0: 3, 1: 3, 2: 3}},
    {"leave": {0: 1}},
    {"stop_s": 11.05},
    {"die_s": 9.2},
    {"die_s": 17.7, "leave": {1: 3}},
    {"leave": {1: 3}, "changes": [(7.0, 1), (8.5, 0), (13.0, 0)]},
]


def played(paradigm, cut=None, status="finished", **how):
    """Write a trace of the run with its rows up to the `cut`-th and this status."""
    job, rows = job_of(paradigm), Recorder()
    fields = play(job, rows, (1.0, 1.3, 2.1), **how)
    return job, rows.rows[:cut], fields, status


def write(path, job, rows, fields, status):
    with TraceWriter(path, attributes(job), fields) as trace:
        for row in rows:
            trace.append(*row)
        trace.close(status)
    return path


def counted_leads(trace):
    """Return the largest push lead of each worker, from the recount of the audit in memory."""
    recount, largest = Recount(trace), np.zeros(trace.n_workers, np.int64)
    np.maximum.at(largest, recount.pushes["worker"], recount.push_lead)
    return largest.tolist()


def summed_leads(trace):
    return [worker.push_gap_max_iters for worker in summarize(trace).workers]


@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_push_leads_equal_those_of_the_audit(paradigm, how):
    assert summed_leads(as_trace(*played(paradigm, **how))) == counted_leads(record(paradigm, **how))
    for cut in range(0, 100, 13):  # as if killed there: pushes that waited for a barrier are missing
        trace = as_trace(*played(paradigm, cut, "failed", **how))
        assert summed_leads(trace) == counted_leads(trace)


def test_control_of_the_push_leads():
    trace = record("asp", leave={2: 4})
    departures = trace.tables["membership"]
    at_once = edit(trace, "membership", departures["worker"].tolist().index(2), seq=1)
    for wrong in (with_rows(trace, "membership", departures[:0]), at_once):
        assert counted_leads(wrong) == summed_leads(wrong) != summed_leads(trace)


def test_leads_of_an_unfinished_run_end_at_the_first_missing_row():
    cut = remove(with_status(record("asp"), "failed"), "grants", 20)
    assert summed_leads(cut) == counted_leads(cut)
    assert max(summed_leads(cut)) < max(summed_leads(with_status(cut, "finished")))


def test_leads_do_not_depend_on_the_order_of_pushes_in_the_file():
    trace = record("asp", jitter=0.5, leave={1: 5})
    shuffled = np.random.default_rng(1).permutation(trace.tables["pushes"])
    other = dataclasses.replace(trace, tables={**trace.tables, "pushes": shuffled})
    assert summed_leads(other) == summed_leads(trace)


@pytest.mark.parametrize("paradigm", PARADIGMS)
@pytest.mark.parametrize(
    ("slice_rows", "cut", "status"),
    # 11 rows: the last allocation of batches is cut in two
    [(1, 61, "failed"), (11, None, "finished"), (7, 0, "failed"), (100_000, None, "finished")],
)
def test_a_file_read_in_slices_has_the_same_summary(tmp_path, paradigm, slice_rows, cut, status):
    path = write(tmp_path / "trace.h5", *played(paradigm, cut, status, jitter=0.5, leave={1: 5}))
    with reader.opened(path, slice_rows) as file:
        assert summarize(file) == summarize(reader.load(path))


@pytest.mark.parametrize("iteration", [-1, 0, 2**40])
def test_iterations_that_do_not_count_pushes_are_refused(iteration):
    with pytest.raises(TraceError, match=r"in-memory\.h5: a damaged trace: the iterations in pushes"):
        summarize(edit(record("asp"), "pushes", 5, iteration=iteration))


# ---- workers that commit, and compression ----------------------------------------------------------------------------


def test_plan_of_ashl():
    trace = record("ashl", jitter=0.3, updates=60)
    summary, decisions = summarize(trace), trace.tables["decisions"]
    begun = decisions[decisions["controller"] == b"stage"]
    assert [summary.coarse_s, summary.fine_s] == begun["now_s"].tolist()
    last = decisions[decisions["seq"] > begun["seq"][1]]
    for name, controller in (("local_steps", b"local-steps"), ("data_share", b"share"), ("ratio", b"ratio")):
        told = [getattr(worker, name) for worker in summary.workers]
        assert told == last["chosen"][last["controller"] == controller].tolist()
    shown = text(summary)
    assert f"coarse from {summary.coarse_s:.2f} s on, fine from {summary.fine_s:.2f} s on" in shown
    assert re.search(r"^2 .*\b2 +22\.2 % +1\d\.\d %$", shown, re.MULTILINE), "H, D and R of worker 2"
    assert max(map(len, shown.splitlines())) <= 80


def test_no_plan_while_ashl_profiles():
    summary = summarize(record("ashl", updates=5))
    assert (summary.coarse_s, summary.fine_s, summary.workers[0].local_steps) == (None, None, None)


@pytest.mark.parametrize("paradigm", ["adsp", "ssp", "easgd", "ashl", "async-diloco"])
def test_the_lead_at_the_start_is_that_of_all_grants_but_stops(paradigm):
    trace = record(paradigm, (1.0, 1.3, 5.0), jitter=0.3)
    grants = trace.tables["grants"]
    leads = [grants["gap_iters"][(grants["worker"] == w) & (grants["local_steps"] != 0)].max() for w in range(3)]
    assert max(leads) > 0
    assert [worker.start_gap_max_iters for worker in summarize(trace).workers] == leads


def test_commits_of_adsp():
    trace = record("adsp", jitter=0.3, updates=60)
    decisions, pushes = trace.tables["decisions"], trace.tables["pushes"]
    summary = summarize(trace)
    assert summary.commits == decisions["chosen"][decisions["controller"] == b"commits"][-1]
    counts = np.bincount(pushes["worker"])
    assert summary.commits_apart == counts.max() - counts.min()
    assert f"{summary.commits} per period planned, workers {summary.commits_apart} apart" in text(summary)
    fixed = summarize(record('name = "adsp"\ncheck_period_s = 12\ncommits = 3'))
    assert fixed.commits == 3
    assert summarize(record("asp", updates=12)).commits is None


def test_only_workers_that_stay_are_compared_in_commits():
    trace = record("adsp", jitter=0.3, updates=60, leave={1: 5})
    first, gone, third = (worker.pushes for worker in summarize(trace).workers)
    assert gone < min(first, third)
    assert summarize(trace).commits_apart == abs(first - third)
    left = trace.tables["membership"][:1]
    after = left.copy()
    after["seq"] = trace.tables["pushes"]["seq"].max() + 1
    assert summarize(with_rows(trace, "membership", after)).commits_apart == max(first, third) - gone
    alone = np.concatenate([left, left])
    alone["worker"] = 1, 2
    summary = summarize(with_rows(trace, "membership", alone))
    assert summary.commits_apart is None
    assert f"{summary.commits} per period planned\n" in re.sub(" +\n", "\n", text(summary))


def test_bytes_and_time_of_compression():
    compressed = record('name = "asp"\n[compression]\nname = "sign"', updates=12)
    pushes = compressed.tables["pushes"]
    shares = [pushes[name].sum() for name in ("encode_s", "compute_s", "wait_s", "comm_s")]
    summary = summarize(compressed)
    assert summary.encode_share == pytest.approx(shares[0] / sum(shares))
    summary = summary.model_copy(update={"iterations": 99})
    assert f"2.5 kB per push, including the read; takes {100 * summary.encode_share:.1f} % of the time" in text(summary)
    assert summarize(record("asp", updates=12)).encode_share is None
    assert "compression" not in text(summarize(record("asp", updates=12)))


def test_loading_has_a_share_and_a_column_where_it_takes_time():
    summary = summarize(edit(trace(), "pushes", 2, load_s=0.5, compute_s=1.5))
    assert (summary.workers[1].load_share, summary.workers[1].compute_share) == (0.5 / 5.0, 3.5 / 5.0)
    assert summary.wait_share == 0.5 / 9.0
    assert "load" in text(summary) and "10.0 %" in text(summary)
    assert "load" not in text(summarize(trace()))


# ---- without servers -------------------------------------------------------------------------------------------------

GOSSIP = 'name = "gossip"\nmode = "push"\nperiod = 2'
#            now_s w it peer bytes comp wait comm loss b begin end n weight load
EXCHANGES = [
    (1.0, 0, 1, NO_PEER, 0, 1.0, 0.0, 0.0, 2.0, 8, 0.0, 1.0, 0, 1.0, 0.0, NAN, 0),
    (2.0, 1, 1, NO_PEER, 0, 2.0, 0.0, 0.0, 2.0, 8, 0.0, 2.0, 0, 1.0, 0.0, NAN, 0),
    (2.5, 0, 2, 1, 400, 1.0, 0.25, 0.25, 1.5, 8, 1.0, 2.0, 0, 1.0, 0.0, NAN, 0),
    (5.0, 1, 2, 1, 0, 2.0, 0.0, 0.0, 1.0, 8, 2.0, 4.0, 1, 1.0, 0.0, NAN, 0),
    (6.0, 0, 2, NO_PEER, 0, 0.0, 0.0, 0.0, math.nan, 0, 6.0, 6.0, 1, 1.0, 0.0, NAN, 0),
]
STEPS = [(version, row[0], 1, 0.1, 8 * version) for version, row in enumerate(EXCHANGES[:4], 1)]
JUDGED = [(2.5, 3, 24, 0.4, 0.9, 0.5), (6.0, 4, 32, 0.3, 0.95, 0.25)]


def gossip(**tables):
    given = {"exchanges": EXCHANGES, "updates": STEPS, "evaluations": JUDGED, **tables}
    return as_trace(job_of(GOSSIP, 2), [(name, row) for name, rows in given.items() for row in rows])


def test_a_run_without_servers():
    summary = summarize(gossip())
    assert (summary.paradigm, summary.n_servers, summary.n_workers) == ("gossip", 0, 2)
    assert (summary.duration_s, summary.updates, summary.samples) == (6.0, 4, 32)
    assert (summary.iterations, summary.exchanges, summary.wire_bytes) == (4, 1, 400)
    assert summary.wait_share == 0.25 / 6.5
    assert (summary.final_accuracy, summary.final_loss, summary.consensus_distance) == (0.95, 0.3, 0.25)
    first, second = summary.workers
    assert (first.iterations, first.exchanges, first.wire_bytes) == (2, 1, 400)
    assert (first.compute_share, first.wait_share, first.comm_share) == (2 / 2.5, 0.1, 0.1)
    assert (second.iterations, second.exchanges, second.wire_bytes) == (2, 0, 0)
    for side in (summary, first, second):
        assert side.pushes is side.dropped is side.staleness_mean is side.staleness_max is None
        assert side.start_gap_max_iters is side.push_gap_max_iters is None


def test_table_of_a_run_without_servers():
    shown = text(summarize(gossip()))
    for words in ("gossip (push), 2 workers", "0.25 apart at the end", "iterations", "exchanges", "10.0 %", "kB moved"):
        assert words in shown
    assert "pushes" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_run_with_separated_layers():
    layers = {"name": "stanza", "cut": "classifier", "fc_workers": 2, "fc_share": 0.3}
    sizes = {"name": "timing", "batch_size": 4, "parameters": 100, "classifier": 90, "activations": 5}
    job = peer_recorder.peer_job(layers, (1.0,) * 5, workload=sizes, samples=60)
    summary = summarize(peer_recorder.in_memory(job, peer_recorder.simulated(job)))
    assert (summary.iterations, summary.updates, summary.samples) == (25, 5, 60)  # of three convolution workers
    assert [worker.layers for worker in summary.workers] == ["fully-connected"] * 2 + ["convolution"] * 3
    shown = text(summary)
    assert "stanza, 5 workers: 2 fully-connected, 3 convolution" in shown
    assert "wait: for the other side of the cut" in shown
    assert "exchanges" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "layers" not in text(summarize(gossip()))


def test_empty_run_without_servers():
    summary = summarize(gossip(exchanges=[], updates=[], evaluations=[]))
    assert (summary.iterations, summary.exchanges, summary.consensus_distance) == (0, 0, None)
    assert text(summary)
    assert json.loads(json.dumps(summary.as_dict(), allow_nan=False))["pushes"] is None


@pytest.mark.parametrize("paradigm", peer_recorder.PARADIGMS)
@pytest.mark.parametrize("slice_rows", [1, 7])
def test_exchanges_read_in_slices_have_the_same_summary(tmp_path, paradigm, slice_rows):
    job = peer_recorder.peer_job(paradigm, leave={1: 5})
    path = write(tmp_path / "trace.h5", job, peer_recorder.simulated(job), (), "finished")
    with reader.opened(path, slice_rows) as file:
        summary = summarize(file)
    assert summary == summarize(reader.load(path))
    assert sum(worker.iterations for worker in summary.workers) == summary.iterations
    for worker in summary.workers:
        rest = worker.between_share  # compression
        assert worker.compute_share + worker.wait_share + worker.comm_share + rest == pytest.approx(1.0)


# ---- events ---------------------------------------------------------------------------------------------------------


def with_events(trace, *events):
    job = trace.job.model_copy(update={"cluster": trace.job.cluster.model_copy(update={"events": tuple(events)})})
    return dataclasses.replace(trace, attributes={**trace.attributes, "job": job.to_toml()})


def event(worker, change="leave", **when):
    return ClusterEvent(worker=worker, change=change, **when)


def test_events_that_did_not_occur_are_named():
    assert (summarize(trace()).events, summarize(trace()).events_missed) == (0, ())
    # The run lasts 5 s; worker 0 makes three iterations and worker 1 two.
    occurred = [event(0, at_s=5.0), event(0, at_iteration=4), event(1, at_iteration=3)]
    assert summarize(with_events(trace(), *occurred)).events_missed == ()
    assert "did not occur" not in text(summarize(with_events(trace(), *occurred)))
    missed = [event(0, at_s=5.5), event(0, at_iteration=5), event(1, at_iteration=1000), event(1, at_s=9.0)]
    summary = summarize(with_events(trace(), occurred[0], *missed))
    names = ("worker 0, leave at 5.5 s", "worker 0, leave at its iteration 5", "worker 1, leave at its iteration 1,000")
    assert (summary.events, summary.events_missed) == (5, (*names, "worker 1, leave at 9 s"))
    words = " ".join(text(summary).split())
    assert f"4 of 5 did not occur before the run ended: {'; '.join(names)}; and 1 more" in words


def test_iterations_after_the_last_push_may_have_been_made():
    elastic = record('name = "easgd"\nperiod = 1', updates=6)
    last = int(np.bincount(elastic.tables["pushes"]["worker"])[0])
    assert summarize(with_events(elastic, event(0, at_iteration=last + 2))).events_missed
    for row in range(len(elastic.tables["pushes"])):
        elastic = edit(elastic, "pushes", row, local_steps=4)
    assert not summarize(with_events(elastic, event(0, at_iteration=4 * last + 4))).events_missed
    assert summarize(with_events(elastic, event(0, at_iteration=4 * last + 6))).events_missed
