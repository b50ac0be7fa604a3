"""The status of a run under way: what it recounts from rows, the time left, and its view."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpcsync.cli.watch import _Lines
from hpcsync.core.assignments import decision_fields
from hpcsync.paradigms.dssp import DsspOptions
from hpcsync.paradigms.records import Problem
from hpcsync.report import live_view
from hpcsync.report.live import (
    PARTS,
    VERSION,
    WINDOWS,
    Decision,
    Moment,
    NotFinite,
    RowTally,
    Stall,
    Status,
    Workers,
    columns,
    known,
    recent,
    samples_per_s,
    time_left,
)
from hpcsync.report.summary import summarize
from hpcsync.run_dir.status_file import SELDOM_S
from hpcsync.trace.schema import Phase
from tests.unit.trace.peer_recorder import record as record_peers
from tests.unit.trace.recorder import record


def tally_of(trace, skipped=0):
    """Return the tally of a trace whose rows come in pieces; `skipped` leaves out the first of a table."""
    tally = RowTally(trace.n_workers)
    for table, rows in trace.tables.items():
        for piece in np.array_split(rows[skipped:], 3):
            tally.add(table, piece)
    return tally


@pytest.mark.parametrize("paradigm", ["bsp", "asp", "dssp", "easgd"])
def test_shares_and_staleness_are_those_of_the_summary(paradigm):
    trace = record(paradigm)
    expected = summarize(trace).workers
    tally = tally_of(trace)
    for part, shares in zip(PARTS, tally.shares, strict=True):
        np.testing.assert_allclose(shares, [getattr(each, f"{part}_share") for each in expected], rtol=1e-12)
    np.testing.assert_allclose(tally.staleness, [each.staleness_mean for each in expected], rtol=1e-12)
    shorter = tally_of(trace, skipped=4)
    assert not np.allclose(shorter.seconds, tally.seconds, rtol=1e-12), "the test can tell"


def test_without_servers_there_is_no_staleness():
    trace = record_peers("pull")
    tally = tally_of(trace)
    np.testing.assert_allclose(tally.shares[1], [each.compute_share for each in summarize(trace).workers], rtol=1e-12)
    workers = columns(
        tally, ["n"] * trace.n_workers, [0] * trace.n_workers, [1] * trace.n_workers, [1] * trace.n_workers, {0}
    )
    assert all(math.isnan(value) for value in workers.staleness)


def test_leads_are_over_the_slowest_that_is_left():
    trace = record("asp", leave={1: 2})
    workers = columns(tally_of(trace), ["n"] * 3, [Phase.COMPUTING] * 3, [9, 2, 5], [9, 2, 5], {0, 2})
    assert workers.state == ("computing", "left", "computing")
    assert workers.lead == (4, None, 0)
    everyone = columns(tally_of(trace), ["n"] * 3, [Phase.COMPUTING] * 3, [9, 2, 5], [9, 5, 5], {0, 1, 2})
    assert everyone.lead == (4, 0, 0), "joined again, and counts as far as the slowest"
    assert everyone.iteration == (9, 2, 5)


def test_a_worker_without_a_rank_is_unknown():
    workers = columns(tally_of(record("asp")), ["n"] * 2, [Phase.COMPUTING] * 2, [9, 2, 5], [9, 2, 5], {0, 1, 2})
    assert (workers.host[2], workers.state[2], workers.iteration[2]) == ("", "unknown", 5)


def test_a_stall_lasts_until_its_iteration_ends():
    trace = record("asp")
    rows = np.zeros(1, trace.tables["stalls"].dtype)
    rows["worker"], rows["iteration"] = 1, 7
    tally = RowTally(3)
    tally.add("stalls", rows)
    assert tally.states([Phase.COMPUTING] * 3, [9, 6, 9], {0, 1, 2}) == ("computing", "stalled", "computing")
    assert tally.states([Phase.COMPUTING] * 3, [9, 7, 9], {0, 1, 2}) == ("computing",) * 3


def test_the_latest_decision_of_each_controller_has_its_inputs():
    trace = record("k-batches", (1.0, 2.0, 4.0, 8.0), updates=60, jitter=1.0)
    rows, fields = trace.tables["decisions"], decision_fields(trace.job)
    assert {*rows["controller"]} == {b"k", b"batches"}
    for n_rows in range(len(rows) - 3, len(rows) + 1):
        tally = RowTally(4)
        tally.add("decisions", rows[:n_rows])
        assert len(tally.decisions) == 2
        for found in tally.decisions:
            last = rows[:n_rows][rows[:n_rows]["controller"] == found.controller.encode()][-1]
            assert (found.worker, found.chosen, found.now_s) == (last["worker"], last["chosen"], last["now_s"])
            assert found.inputs == {name: last[name] for name in fields if not math.isnan(last[name])} != {}


def test_times_that_elapse_are_no_decisions():
    trace = record("async-diloco", jitter=0.3)
    rows = trace.tables["decisions"]
    assert {b"elapsed", b"local-steps"} <= {*rows["controller"].tolist()}
    tally = RowTally(3)
    tally.add("decisions", rows)
    assert [decision.controller for decision in tally.decisions] == ["local-steps"]


def steps(*problems, worker=1, first=1):
    """Return rows of /pushes of a worker, each with its problem."""
    rows = np.zeros(len(problems), record("asp").tables["pushes"].dtype)
    rows["worker"], rows["batch_size"], rows["problem"] = worker, 8, problems
    rows["iteration"] = first + np.arange(len(problems))
    return rows


@pytest.mark.parametrize(
    ("problem", "what"), [(Problem.LOSS_NOT_FINITE, "loss"), (Problem.GRADIENT_NOT_FINITE, "gradient")]
)
def test_a_worker_has_diverged_while_its_latest_step_is_not_finite(problem, what):
    tally = RowTally(3)
    tally.add("pushes", steps(Problem.NONE, Problem.SKIPPED))
    assert tally.not_finite == ()
    tally.add("pushes", steps(Problem.NONE, problem, problem, Problem.SKIPPED, problem, first=3))
    tally.add("pushes", steps(Problem.NONE, worker=0))
    assert tally.not_finite == (NotFinite(worker=1, what=what, iteration=4),)
    tally.add("pushes", steps(Problem.NONE, first=9))
    assert tally.not_finite == (), "it has recovered"


def test_a_model_that_arrives_after_the_end_is_no_sign_of_recovery():
    tally, late = RowTally(3), steps(Problem.NONE, first=9)
    late["batch_size"] = 0
    tally.add("exchanges", steps(Problem.LOSS_NOT_FINITE))
    tally.add("exchanges", late)
    assert [worker.iteration for worker in tally.not_finite] == [1]


def test_the_newest_stalls_of_three_workers_are_kept():
    tally, rows = RowTally(6), np.zeros(7, record("asp").tables["stalls"].dtype)
    rows["worker"], rows["now_s"] = [0, 1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 5, 6, 7]
    tally.add("stalls", rows)
    assert [(stall.worker, stall.now_s) for stall in tally.stalls] == [(1, 7.0), (5, 6.0), (4, 5.0)]


def test_what_json_does_not_have_is_not_known():
    assert [known(value) for value in (math.nan, math.inf, -math.inf, 0.5)] == [None, None, None, 0.5]


def test_there_is_no_rate_before_time_has_passed():
    assert samples_per_s(moments([0.0])) is None, "no time has passed"


def moments(shares):
    return [Moment(float(i), float(i), i, share) for i, share in enumerate(shares)]


def test_the_time_left_follows_from_the_rate_and_its_spread():
    assert time_left(moments(np.linspace(0, 0.5, 13))) == pytest.approx((12.0, 12.0, 12.0))
    mean, least, most = time_left(moments([0, 0.01, 0.02, 0.04, 0.06, 0.07, 0.08]))
    assert (least, most) == pytest.approx((0.92 / 0.02, 0.92 / 0.01))
    assert mean == pytest.approx(0.92 / (0.08 / 6))


@pytest.mark.parametrize(("every_s", "n_kept"), [(1.0, 61), (SELDOM_S + 0.05, WINDOWS + 1)])
def test_the_time_left_is_known_however_seldom_the_status_is_written(every_s, n_kept):
    kept = []
    for i in range(100):
        kept = recent(kept, Moment(i * every_s, i * every_s, i, i / 200))
    assert len(kept) == n_kept
    assert time_left(kept) == pytest.approx((101 * every_s,) * 3)


@pytest.mark.parametrize("shares", [[0.1] * 12, [math.nan] * 12, [0.1, 0.2, 0.3], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]])
def test_without_progress_without_limits_or_at_the_begin_no_time_is_known(shares):
    assert time_left(moments(shares)) is None


def status(n_workers=3, **values):
    done = [100 + w for w in range(n_workers)]
    hosts, phases = ["a" * 30, *["b"] * (n_workers - 1)], [Phase.COMPUTING] * n_workers
    workers = columns(RowTally(n_workers), hosts, phases, done, done, range(n_workers))
    settings = {
        "version": VERSION,
        "name": "digits",
        "paradigm": "dssp",
        "n_servers": 1,
        "status": "running",
        "written_s": 0.0,
        "every_s": 1.0,
        "now_s": 12.5,
        "updates": 100,
        "samples": 3200,
        "samples_per_s": 1234.5,
        "loss": 0.25,
        "accuracy": 0.91,
        "target": "accuracy 0.97",
        "share": 0.4,
        "left_s": (60.0, 50.0, 75.0),
        "lead_bound": 4.0,
        "bound": "a worker more than 3 iterations ahead of the slowest waits for it, which is a long sentence",
        "decisions": (Decision(controller="dssp", worker=1, chosen=3.0, now_s=12.0, inputs={"interval_s": 0.5}),),
        "stalls": (),
        "workers": workers,
    }
    return Status(**{**settings, **values})


def text(shown, width=80, height=24, age_s=0.5):
    console = Console(width=width, height=height, color_system=None, file=io.StringIO())
    console.print(live_view.render(shown, age_s, console, height))
    return console.file.getvalue()


def test_it_says_what_one_wants_to_know():
    shown = text(status())
    for part in ("running", "40 %", "1,234 samples/s", "0:01:00 left (0:00:50 to 0:01:15)", "accuracy 0.9100"):
        assert part in shown
    assert "dssp at 12.0 s: worker 1 gets credits for 3 iterations\n" in "\n".join(map(str.rstrip, shown.splitlines()))


def test_one_update_is_no_updates():
    assert "32 samples  1 update  loss" in text(status(samples=32, updates=1))


def test_output_beside_the_view_does_not_cut_its_lines():
    console = Console(width=30, height=24, force_terminal=True, color_system=None, file=io.StringIO())
    long = "a " * 20 + "whole line, which is wider than the terminal"
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text(long), refresh=True)
        before = len(console.file.getvalue())
        _Lines(console).write(1, f"starting {'x' * 50}\n".encode())
        shown = console.file.getvalue()[before:]
        assert f"starting {'x' * 50}\n" in shown, "it is not broken into lines, which could not be copied"
        assert "the terminal" in shown, "the end of the view"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("accuracy 0.97", "accuracy 0.9100 (target 0.97)"),
        ("loss 0.3", "accuracy 0.9100 (target loss 0.3)"),
        (None, "accuracy 0.9100"),
    ],
)
def test_the_target_is_beside_what_it_is_of(target, words):
    assert f"loss 0.25  {words}" in map(str.rstrip, text(status(target=target)).splitlines()[2].split("updates  "))


def test_a_target_of_the_loss_is_not_of_the_training_loss():
    shown = text(status(target="loss 0.3", accuracy=None)).splitlines()[2]
    assert shown.rstrip().endswith("loss 0.25 (target loss 0.3 at an evaluation)")


GAP = {"gap_iters": 6.0, "interval_s": 0.05964, "predicted_wait_s": -0.0003577, "r_star": 4.0, "slowest": 0.0}


@pytest.mark.parametrize(
    ("controller", "chosen", "inputs", "words"),
    [
        ("dssp", 4.0, GAP, "dssp at 4.0 s: worker 1, 6 iterations ahead, gets credits for 4 iterations"),
        ("dssp", 1.0, GAP, "dssp at 4.0 s: worker 1, 6 iterations ahead, gets credits for 1 iteration"),
        ("dssp", 0.0, GAP, "dssp at 4.0 s: worker 1, 6 iterations ahead, waits"),
        ("k", 3.0, {"x": 1.0}, "k at 4.0 s: each update uses 3 contributions"),
        ("batches", 48.0, {}, "batches at 4.0 s: worker 1 takes batches of 48"),
        ("share", None, {}, "share at 4.0 s: worker 1 takes ? of the data"),
        ("switch", 30_016.0, {}, "switch at 4.0 s: switched after 30,016 samples"),
        ("another", 2.5, {"x": 1.0}, "another at 4.0 s: 2.5 for worker 1"),
    ],
)
def test_decisions_are_in_words(controller, chosen, inputs, words):
    decision = Decision(controller=controller, worker=1, chosen=chosen, now_s=4.0, inputs=inputs)
    lines = [line.rstrip() for line in text(status(decisions=(decision,))).splitlines()]
    assert words in lines


@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_the_bound_of_dssp_fits_a_line(mode):
    bound = DsspOptions(staleness_min=10, staleness_max=100, mode=mode).bound
    assert bound in text(status(bound=bound)).splitlines()[-1] and len(bound) <= 80


@pytest.mark.parametrize("n_workers", [1, 3, 16, 17, 18, 1000])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (120, 50)])
def test_it_fits_the_terminal_whatever_the_number_of_workers(n_workers, width, height):
    lines = text(status(n_workers), width, height).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert any("computing" in line and " lead " not in line for line in lines), "states are not cut"
    if n_workers == 1000:
        assert any("faster workers: iteration" in line for line in lines)


def test_columns_show_what_a_run_has_and_the_others_are_summed_up():
    waits = tuple(None if w == 25 else w / 100 for w in range(30))
    shares = {"compute": (0.25,) * 30, "wait": waits, "comm": (0.5,) * 30, "staleness": (1.5,) * 30}
    workers = status(30).workers.model_copy(update={"host": ("a",) * 30, "load": (None,) * 30, **shares})
    lines = [line.split() for line in text(status(workers=workers)).splitlines()]
    assert ["worker", "state", "iteration", "lead", "staleness", "compute", "wait", "comm"] in lines
    assert ["3", "computing", "103", "3", "1.50", "25", "%", "3", "%", "50", "%"] in lines
    (n,) = (int(line[1]) for line in lines if line[0] == "and")
    folded = f"and {n} faster workers: iteration {130 - n} to 129, lead up to 29, wait {30 - n} % to 29 %"
    assert folded.split() in lines
    loading = workers.model_copy(update={"load": (0.01,) * 30})
    peers = [line.split() for line in text(status(workers=loading, n_servers=0)).splitlines()]
    assert ["worker", "state", "iteration", "lead", "load", "compute", "wait", "comm"] in peers


def test_who_is_in_trouble_comes_first_then_the_slowest():
    workers = status(5).workers.model_copy(update={"state": ("computing", "waiting", "stalled", "left", "died")})
    assert live_view.order(workers) == [4, 2, 3, 0, 1]


def test_names_of_hosts_are_no_markup():
    workers = status(3).workers.model_copy(update={"host": ("[/red]", "[b]bold", "c")})
    lines = text(status(workers=workers), width=120).splitlines()
    assert [name for name in ("[/red]", "[b]bold", "c ") if any(name in line for line in lines)] == [
        "[/red]",
        "[b]bold",
        "c ",
    ]


def test_an_old_status_is_said_to_be_old():
    assert "no status update for 34 s" in text(status(), age_s=34.0)
    assert "no news" not in text(status(status="finished"), age_s=34.0)
    assert "no news" not in text(status(every_s=12.0), age_s=34.0)
    assert "no news" not in text(status(), age_s=9.0)
    assert "left" not in text(status(status="failed"))


def test_a_stall_is_shown():
    stall = Stall(worker=2, iteration=101, now_s=11.0, lasted_s=4.0, phase="computing")
    assert "worker 2 stalled at 11.0 s (computing): iteration 101 had lasted 4.0 s" in text(status(stalls=(stall,)))


def test_a_run_that_has_diverged_is_no_run_without_a_loss():
    assert "diverged" not in text(status(loss=None))
    nan = [NotFinite(worker=w, what="loss", iteration=1234 + w) for w in (2, 0)]
    shown = status(loss=None, not_finite=nan[:1])
    assert "diverged: loss not finite since iteration 1,236 (worker 2)" in map(str.rstrip, text(shown).splitlines())
    shown = status(loss=None, not_finite=nan)
    assert "since iteration 1,236 (2 of 3 workers, first worker 2)" in text(shown)
    assert Status.model_validate_json(shown.model_dump_json()).not_finite == tuple(nan)


def test_a_status_of_an_earlier_release_is_read():
    written = json.loads(status().model_dump_json())
    del written["not_finite"]
    assert Status.model_validate(written).not_finite == ()


def test_it_is_json_and_back():
    assert Status.model_validate_json(status().model_dump_json()).name == "digits"
    assert isinstance(Status.model_validate_json(status().model_dump_json()).workers, Workers)
