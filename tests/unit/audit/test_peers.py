"""Audits of runs without servers.

Correct traces pass, wherever they end. After one change exactly the expected checks fail.
"""

import dataclasses
import math

import numpy as np
import pytest
from rich.console import Console

from hpcsync.audit.trace_audit import audit, main
from hpcsync.paradigms.gossip import GossipOptions, PushTogether
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.trace import reader
from hpcsync.trace.schema import Change
from hpcsync.trace.writer import TraceWriter
from tests.unit.audit.failing import failing
from tests.unit.trace.peer_recorder import BATCHES, PARADIGMS, in_memory, peer_job, record, simulated
from tests.unit.trace.recorder import as_trace, attributes, edit, on_ranks, remove, with_rows, with_status

POSSIBLE = "values are valid"
ITERATIONS = "iteration is the worker's step count"
TIMES = "times are in order"
PEERS = "peers follow from the job and its seed"
SENT = "as many models are received as sent"
WEIGHTS = "weights are 1"
PUSH_SUM = "push-sum weights add up"
BYTES = "exchanges of one kind have equal wire_bytes"
UPDATES = "updates are the workers' steps"
SAMPLES = "sample counts add up"
RATES = "learning rates follow the schedule"
DISTANCES = "consensus distances are valid"
EVALUATED = "evaluations come when they are due"
SAME = "all replicas have equal weights"
LEFT = "no worker acts after it leaves"
END = "the stopping rule ended the run"
IN_STEP = "no worker begins before all have exchanged"
ALONE = "no worker waits for others"
ROWS = "values of /decisions are valid"
SIZES = "batch sizes equal the agreed sizes"
FOLLOW = "batch sizes follow from the predicted times"
DUE = "batch sizes are agreed on when due"


def find(trace, table="exchanges", **values):
    """Return the first row with these values."""
    rows = trace.tables[table]
    return int(np.flatnonzero(np.logical_and.reduce([rows[column] == value for column, value in values.items()]))[0])


def with_exchange(trace):
    """Return the first row of an exchange with another worker."""
    rows = trace.tables["exchanges"]
    return int(np.flatnonzero((rows["peer"] != NO_PEER) & (rows["peer"] != rows["worker"]))[0])


@pytest.fixture(scope="module", params=PARADIGMS)
def trace(request):
    return record(request.param)


@pytest.fixture(scope="module")
def traces():
    return {paradigm: record(paradigm) for paradigm in PARADIGMS}


# ---- correct traces --------------------------------------------------------------------------------------------------


def test_the_audit_asks_for_traits_and_never_for_a_mode(traces, monkeypatch):
    monkeypatch.setattr(GossipOptions, "form_key", "name")
    assert [paradigm for paradigm, trace in traces.items() if failing(trace)] == []


def test_peers_that_a_method_draws_otherwise_than_declared_are_found(monkeypatch):
    monkeypatch.setattr(PushTogether, "_select", lambda self, round: [1, 2, 0])
    assert PEERS in failing(record("push-together"))


HOWS = [
    {},
    {"seconds": (1.0,)},
    {"seconds": (1.0,) * 5, "jitter": 0.0},
    {"seconds": (1.0,) * 4, "jitter": 0.0, "network": False},
    {"leave": {1: 6}},
    {"leave": {0: 1, 2: 5}},
    {"leave": {0: 3, 1: 7, 2: 5}},
    {"leave": {0: 9, 1: 9}, "stop": {"updates": 41}},
    {"stop": {"updates": 37}},
    {"stop": {"seconds": 17.3}},
    {"stop": {"target_loss": 0.5, "samples": 4000}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine", "total": 200}}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "lr_clock": "updates", "schedule": {"name": "cosine", "total": 9}}},
    {"samples": 8},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_correct_traces_pass(paradigm, how):
    assert failing(record(paradigm, **how)) == set()


@pytest.mark.parametrize("how", [{}, {"leave": {1: 6}}, {"leave": {0: 3, 1: 7, 2: 5}}], ids=str)
@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_trace_that_ends_after_any_row_passes(paradigm, how):
    job = peer_job(paradigm, samples=160, **how)
    rows = simulated(job)
    for n_rows in range(len(rows) + 1):
        assert failing(as_trace(job, rows[:n_rows], status="running")) == set(), n_rows


SHARED = [
    {},
    {"jitter": 0.0, "network": False},
    {"seconds": (1.0,)},
    {"seconds": (1.0,) * 5, "jitter": 0.0},
    {"leave": {1: 6}},
    {"leave": {0: 1, 2: 5}},
    {"leave": {0: 5, 1: 5}},
    {"leave": {0: 3, 1: 7, 2: 5}},
    {"leave": {0: 9, 1: 9, 2: 9}},
    {"stop": {"updates": 17}},
    {"stop": {"samples": 401}},
    {"stop": {"seconds": 37.3}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine", "total": 200}}},
    {"batches": {**BATCHES, "policy": "proportional", "gain": 0.2}},
    {"batches": {**BATCHES, "predictor": "blend", "interval": 1, "gain": 0.0}},
    {"batches": {**BATCHES, "maximum": 9}, "leave": {1: 6}},
]


@pytest.mark.parametrize("how", SHARED, ids=str)
def test_correct_traces_pass_whatever_the_sizes(how):
    assert failing(record("allreduce", **{"batches": BATCHES, "samples": 600, **how})) == set()


@pytest.mark.parametrize("leave", [{}, {1: 6}, {0: 5, 1: 5}], ids=str)
def test_a_trace_with_sizes_that_ends_after_any_row_passes(leave):
    job = peer_job("allreduce", samples=400, leave=leave, batches=BATCHES)
    rows = simulated(job)
    assert sum(table == "decisions" for table, _ in rows) > 3
    for n_rows in range(len(rows) + 1):
        assert failing(in_memory(job, rows[:n_rows], "running")) == set(), n_rows


def test_every_check_has_a_name_of_its_own(trace):
    names = [check.name for check in audit(trace)]
    assert len(names) == len(set(names)) >= 13
    assert all(check.n_checked for check in audit(trace))


# ---- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("exchanges", {"worker": 3}),
        ("exchanges", {"worker": -1}),
        ("exchanges", {"iteration": -1}),
        ("exchanges", {"peer": 3}),
        ("exchanges", {"peer": -3}),
        ("exchanges", {"wire_bytes": -1}),
        ("exchanges", {"n_received": -1}),
        ("exchanges", {"batch_size": -1}),
        ("exchanges", {"wait_s": -0.1}),
        ("exchanges", {"comm_s": math.nan}),
        ("exchanges", {"compute_s": math.inf}),
        ("exchanges", {"now_s": math.nan}),
        ("exchanges", {"begin_s": math.nan}),
        ("exchanges", {"weight": 0.0}),
        ("exchanges", {"weight": math.inf}),
        ("updates", {"n_contributions": 0}),
        ("updates", {"now_s": math.nan}),
        ("membership", {"worker": 7}),
        ("membership", {"worker": -1}),
        ("membership", {"now_s": math.nan}),
        ("membership", {"change": Change.JOINED}),
        ("membership", {"change": 3}),
    ],
)
def test_impossible_values_are_the_only_failure(trace, table, values):
    *of_the_file, check = audit(edit(trace, table, 1, **values))
    assert check.name == POSSIBLE and not check.passed
    assert len(of_the_file) == 4 and all(check.passed for check in of_the_file)


@pytest.mark.parametrize("table", ["pushes", "grants", "decisions"])
def test_without_servers_nothing_is_pushed_or_granted(trace, table):
    rows = np.zeros(1, trace.tables[table].dtype)
    *_, check = audit(with_rows(trace, table, rows))
    assert (check.name, check.detail) == (POSSIBLE, f"/{table} has rows without a server (1 of 1 fail)")


def test_iterations(trace):
    for other in (0, 1, 4):
        row = find(trace, iteration=3)
        assert failing(edit(trace, "exchanges", row, iteration=other)) == {ITERATIONS}


def test_a_worker_does_not_continue_after_its_end_and_only_pushes_arrive_late(traces):
    pull = traces["pull"].tables["exchanges"]
    late = pull[-1:].copy()
    late["batch_size"] = late["n_received"] = late["wire_bytes"] = 0
    late["peer"] = NO_PEER
    late["gradient_sq"] = late["mean_gradient_sq"] = np.nan
    assert failing(with_rows(traces["pull"], "exchanges", np.append(pull, late))) == {ITERATIONS}
    push = traces["push"]
    assert (push.tables["exchanges"]["batch_size"] == 0).any()  # allowed for pushes
    rows = push.tables["exchanges"]
    late["worker"], late["now_s"] = 0, rows["now_s"][find(push, worker=0, iteration=2)]
    at = find(push, worker=0, iteration=2) + 1
    assert failing(with_rows(push, "exchanges", np.concatenate([rows[:at], late, rows[at:]]))) == {ITERATIONS}


@pytest.mark.parametrize("column", ["begin_s", "end_s", "compute_s", "load_s"])
def test_a_computation_lasts_from_its_begin_to_its_end(trace, column):
    row = find(trace, iteration=2, worker=0)
    assert failing(edit(trace, "exchanges", row, **{column: trace.tables["exchanges"][column][row] + 1e-3})) == {TIMES}


def test_loading_and_computing_fill_an_iteration(trace):
    row = find(trace, iteration=2, worker=0)
    compute_s = trace.tables["exchanges"]["compute_s"][row]
    assert failing(edit(trace, "exchanges", row, load_s=compute_s / 4, compute_s=0.75 * compute_s)) == set()


def test_no_iteration_is_recorded_before_its_end(trace):
    row = find(trace, iteration=3, worker=1)
    end_s = trace.tables["exchanges"]["now_s"][row] + 1e-3
    begin_s = end_s - trace.tables["exchanges"]["compute_s"][row]
    changed = edit(trace, "exchanges", row, begin_s=begin_s, end_s=end_s)
    assert TIMES in failing(on_ranks(changed)) <= {TIMES, IN_STEP}
    uncertain = on_ranks(changed, 1e-2)
    assert failing(uncertain) <= {TIMES, IN_STEP}  # the next iteration still begins too early
    assert all("is recorded" not in check.detail for check in audit(uncertain))
    again = on_ranks(changed, ((1e-2,), (0.0,)), starts=((0.0, 0), (0.0, 0)))
    assert failing(again) == failing(uncertain), "also where the clocks of a later start are certain"
    assert any("is recorded" in check.detail for check in audit(on_ranks(changed)))


@pytest.mark.parametrize(("start", "error_s"), [(0, 1.5), (1, -1.5)])
def test_a_worker_s_clock_after_a_resume_differs_from_before(trace, start, error_s):
    rows = trace.tables["exchanges"].copy()
    resumed_s = rows["now_s"][rows["iteration"] <= 3].max()
    own = (rows["worker"] == 1) & ((rows["now_s"] > resumed_s) == start)
    rows["begin_s"][own] += error_s
    rows["end_s"][own] += error_s
    moved = with_rows(trace, "exchanges", rows)
    for uncertain_s, names in ((0.7, {TIMES}), (1.51, set())):
        clocks = np.zeros((2, trace.n_workers))
        clocks[start, 1] = uncertain_s
        failed = failing(on_ranks(moved, clocks, starts=((0.0, 0), (resumed_s, 0))))
        assert names <= failed <= names | {IN_STEP}
    assert TIMES in failing(on_ranks(moved, 1.51)), "without a resume"


def test_rows_are_in_the_order_of_their_times(trace):
    rows = trace.tables["exchanges"]
    row = int(np.flatnonzero(np.diff(rows["now_s"]) > 0)[-1])
    assert TIMES in failing(edit(trace, "exchanges", row, now_s=rows["now_s"][row + 1] + 1))


def test_iterations_of_a_worker_do_not_overlap(traces):
    trace = traces["pull"]
    row = find(trace, iteration=3, worker=0)
    before_s = trace.tables["exchanges"]["end_s"][find(trace, iteration=2, worker=0)]
    end_s = trace.tables["exchanges"]["end_s"][row]
    overlapping = {"begin_s": before_s - 1e-3, "compute_s": end_s - before_s + 1e-3}
    assert failing(edit(trace, "exchanges", row, **overlapping)) == {TIMES}


def test_peers(trace):
    row = with_exchange(trace)
    for other in {ALL_PEERS, NO_PEER, 0, 1, 2} - {int(trace.tables["exchanges"]["peer"][row])}:
        assert failing(edit(trace, "exchanges", row, peer=other)) == {PEERS}


def test_peers_are_those_of_the_seed(traces):
    for paradigm in ("pull", "push", "permutation"):
        other = record(paradigm, seed=3)
        assert PEERS in failing(as_seed(traces[paradigm], other))


def as_seed(trace, other):
    return type(trace)(trace.path, other.attributes, trace.tables)


def test_local_steps_have_no_peer(traces):
    for paradigm in ("local-sgd", "push-sum", "permutation"):
        row = find(traces[paradigm], peer=NO_PEER)
        assert failing(edit(traces[paradigm], "exchanges", row, peer=1)) == {PEERS}


@pytest.mark.parametrize("more", [1, -1])
def test_n_received(traces, more):
    for paradigm, trace in traces.items():
        row = find(trace, n_received=2 if paradigm in ("allreduce", "local-sgd") else 1)
        changed = edit(trace, "exchanges", row, n_received=trace.tables["exchanges"]["n_received"][row] + more)
        assert SENT in failing(changed) <= {SENT, PUSH_SUM}


def test_averaging_counts_workers_that_made_a_step():
    trace = record("local-sgd", leave={1: 6, 2: 5})  # within the second period, and right after the first averaging
    assert failing(trace) == set()
    row = find(trace, worker=0, iteration=8)
    assert trace.tables["exchanges"]["n_received"][row] == 1
    assert failing(edit(trace, "exchanges", row, n_received=0)) == {SENT}
    assert failing(edit(trace, "exchanges", row, n_received=2)) == {SENT}


def test_an_unfinished_run_receives_no_more_than_was_sent(traces):
    for paradigm in ("push", "push-sum"):
        trace = with_status(traces[paradigm], "failed")
        row = find(trace, n_received=1)
        assert failing(edit(trace, "exchanges", row, n_received=2)) == set()  # its sender's row may be missing
        assert failing(edit(trace, "exchanges", row, n_received=1 + trace.n_workers + 1)) == {SENT}


def test_weights_without_push_sum_are_one(traces):
    for paradigm in ("allreduce", "local-sgd", "pull", "push", "permutation", "ring"):
        assert failing(edit(traces[paradigm], "exchanges", 3, weight=0.5)) == {WEIGHTS}


def test_push_sum_weights(traces):
    for paradigm in ("push-sum", "exponential"):
        trace = traces[paradigm]
        rows = trace.tables["exchanges"]
        for row in (0, len(rows) // 2, len(rows) - 1):
            for factor in (0.5, 2.0):
                changed = edit(trace, "exchanges", row, weight=rows["weight"][row] * factor)
                assert failing(changed) == {PUSH_SUM}


def test_models_received_at_the_end_are_needed(traces):
    for paradigm in ("push", "exponential"):
        trace = traces[paradigm]
        without = remove(trace, "exchanges", find(trace, batch_size=0))
        assert failing(without) == ({SENT} if paradigm == "push" else {SENT, PUSH_SUM})


def test_bytes(trace):
    row = with_exchange(trace)
    moved = trace.tables["exchanges"]["wire_bytes"][row]
    for other in (moved + 1, moved - 1, 0):
        assert failing(edit(trace, "exchanges", row, wire_bytes=other)) == {BYTES}
    assert failing(edit(trace, "exchanges", slice(None), wire_bytes=0)) == {BYTES}


def test_bytes_where_the_number_of_elements_varies():
    """As many elements of four bytes go to each of the two others."""
    trace = record("allreduce", compression={"name": "top-k", "ratio": 0.25})
    row = with_exchange(trace)
    moved = trace.tables["exchanges"]["wire_bytes"][row]
    for other in (moved, moved + 8):
        assert failing(edit(trace, "exchanges", row, wire_bytes=other)) == set()
    for other in (moved + 4, moved + 1, 0):
        assert failing(edit(trace, "exchanges", row, wire_bytes=other)) == {BYTES}


def test_no_bytes_without_an_exchange(traces):
    for paradigm in ("local-sgd", "push-sum"):
        row = find(traces[paradigm], peer=NO_PEER)
        assert failing(edit(traces[paradigm], "exchanges", row, wire_bytes=8)) == {BYTES}
    rows = traces["pull"].tables["exchanges"]
    itself = int(np.flatnonzero(rows["peer"] == rows["worker"])[0])
    assert failing(edit(traces["pull"], "exchanges", itself, wire_bytes=8)) == {BYTES}
    late = find(traces["push"], batch_size=0)
    assert failing(edit(traces["push"], "exchanges", late, wire_bytes=8)) == {BYTES}


TOGETHER = ("pull-together", "push-together", "push-sum-together")
PERIODS = {"allreduce": 1, "local-sgd": 4, "permutation": 3, "pull-together": 2, "push-together": 1}


@pytest.mark.parametrize(("paradigm", "period"), PERIODS.items())
def test_synchronous_workers_wait_for_all(traces, paradigm, period):
    trace = traces[paradigm]
    rows = trace.tables["exchanges"]
    of_last = rows[rows["iteration"] == period]
    fastest = of_last[np.argmin(of_last["end_s"])]  # could have begun before the others were ready
    row = find(trace, worker=fastest["worker"], iteration=period + 1)
    early_s = float(fastest["end_s"])
    early = {"begin_s": early_s, "compute_s": rows["end_s"][row] - early_s}
    assert failing(edit(trace, "exchanges", row, **early)) == {IN_STEP, TIMES}, "it waits longer than that"
    trace = edit(trace, "exchanges", find(trace, worker=fastest["worker"], iteration=period), wait_s=0.0, comm_s=0.0)
    assert failing(edit(trace, "exchanges", row, **early)) == {IN_STEP}
    assert failing(edit(on_ranks(trace, 60.0), "exchanges", row, **early)) == set()


@pytest.mark.parametrize("paradigm", TOGETHER)
def test_a_synchronous_trace_is_none_of_asynchronous_workers(traces, paradigm):
    """Evaluations are those of the moment of an exchange, before its rows."""
    asynchronous = record({**PARADIGMS[paradigm], "synchronous": False})
    assert failing(asynchronous) == set()
    assert failing(as_seed(traces[paradigm], asynchronous)) == {ALONE, SAMPLES}
    assert failing(as_seed(asynchronous, traces[paradigm])) >= {IN_STEP, END}
    never = {"evaluation": {"every_samples": 10**6}}
    alike = record({**PARADIGMS[paradigm], "synchronous": False}, **never)
    assert failing(as_seed(record(paradigm, **never), alike)) == {ALONE}


@pytest.mark.parametrize("paradigm", ["pull", "push", "push-sum"])
def test_asynchronous_workers_do_not_wait(traces, paradigm):
    trace = traces[paradigm]
    row = with_exchange(trace)
    comm_s = float(trace.tables["exchanges"]["comm_s"][row])
    waiting = {"wait_s": comm_s / 2, "comm_s": comm_s / 2}
    assert failing(edit(trace, "exchanges", row, **waiting)) == {ALONE}
    pairs = traces["ad-psgd"]  # of which a worker waits while another one averages with the same peer
    assert failing(edit(pairs, "exchanges", with_exchange(pairs), wait_s=1e-9)) == set()


def test_updates(trace):
    n_updates = len(trace.tables["updates"])
    assert UPDATES in failing(edit(trace, "updates", 2, version=4))
    assert failing(edit(trace, "updates", 2, n_contributions=2)) == {UPDATES}
    assert UPDATES in failing(edit(trace, "updates", 2, now_s=trace.tables["updates"]["now_s"][2] + 1e-9))
    assert UPDATES in failing(remove(trace, "updates", n_updates - 1))
    twice = np.append(trace.tables["updates"], trace.tables["updates"][-1:])
    assert UPDATES in failing(with_rows(trace, "updates", twice))


def test_an_unfinished_trace_lacks_updates_of_its_last_row_only(traces):
    for paradigm in ("pull", "allreduce"):
        job = peer_job(paradigm)
        rows = simulated(job)
        cut = as_trace(job, rows[: len(rows) // 2], status="failed")
        updates = cut.tables["updates"][:-2]
        evaluations = cut.tables["evaluations"][:0]
        assert failing(with_rows(with_rows(cut, "updates", updates), "evaluations", evaluations)) == {UPDATES}


def test_an_update_waits_for_possible_contributors(traces):
    trace = record("allreduce", leave={1: 6})
    rows = trace.tables["exchanges"]
    assert [(rows["iteration"] == t).sum() for t in (5, 6)] == [3, 2]
    assert trace.tables["updates"]["n_contributions"][4:6].tolist() == [3, 2]
    assert failing(edit(trace, "updates", 5, n_contributions=3)) == {UPDATES}


def test_samples(trace):
    samples = int(trace.tables["updates"]["samples"][-1])
    assert failing(edit(trace, "updates", len(trace.tables["updates"]) - 1, samples=samples + 1)) >= {SAMPLES}
    assert failing(edit(trace, "updates", 0, samples=5)) == {SAMPLES}
    assert SAMPLES in failing(edit(trace, "exchanges", 2, batch_size=5))
    for values in ({"samples": 1}, {"version": 10_000}, {"version": -1}):
        assert {SAMPLES} <= failing(edit(trace, "evaluations", 0, **values)) <= {SAMPLES, EVALUATED}


def test_asynchronous_workers_are_evaluated_after_the_update(traces):
    assert failing(edit(traces["pull"], "evaluations", 0, now_s=0.1)) == {SAMPLES}


def test_learning_rates(trace):
    assert failing(edit(trace, "updates", 3, lr=0.051)) == {RATES}


@pytest.mark.parametrize("lr_clock", ["samples", "updates"])
@pytest.mark.parametrize("paradigm", ["allreduce", "pull"])
def test_learning_rates_are_of_this_schedule(paradigm, lr_clock):
    def run(total):
        schedule = {"name": "cosine", "total": total}
        return record(paradigm, optimizer={"name": "sgd", "lr": 0.1, "lr_clock": lr_clock, "schedule": schedule})

    assert failing(as_seed(run(200), run(201))) == {RATES}


def test_distances(traces):
    assert failing(edit(traces["allreduce"], "evaluations", 1, consensus_distance=1e-300)) == {SAME}
    for paradigm in ("local-sgd", "pull", "push-sum"):
        assert (traces[paradigm].tables["evaluations"]["consensus_distance"] > 0).any()
    for wrong in (-1e-9, math.nan):
        assert failing(edit(traces["pull"], "evaluations", 1, consensus_distance=wrong)) == {DISTANCES}
    diverged = edit(traces["pull"], "evaluations", 1, consensus_distance=math.nan, loss=math.inf)
    assert failing(diverged) == set()


def test_leaving(traces):
    trace = traces["pull"]
    rows = trace.tables["membership"]
    assert failing(edit(trace, "membership", 0, now_s=0.1)) == {LEFT}
    assert failing(edit(trace, "membership", 1, seq=5)) == {LEFT}
    twice = np.append(rows, rows[-1:])
    twice["seq"] = np.arange(1, len(twice) + 1)
    assert failing(with_rows(trace, "membership", twice)) == {LEFT}


def test_the_end(trace):
    assert END in failing(with_rows(trace, "membership", trace.tables["membership"][:0]))
    assert failing(with_status(with_rows(trace, "membership", trace.tables["membership"][:0]), "failed")) == set()


def test_no_run_ends_before_the_rule_holds(traces):
    for paradigm, trace in traces.items():
        assert failing(as_seed(trace, record(paradigm, samples=1000))) == {END}


def test_synchronous_workers_end_when_the_rule_holds(traces):
    for paradigm in ("allreduce", "local-sgd", "permutation", "ring"):
        assert failing(as_seed(traces[paradigm], record(paradigm, samples=160))) == {END}


def test_a_resumed_run_may_have_another_rule(traces):
    """The traces end after 320 samples, by the rule of the job with which they began."""
    for paradigm in ("allreduce", "local-sgd", "permutation", "ring"):
        trace = as_seed(traces[paradigm], record(paradigm, samples=160))
        steps = trace.tables["exchanges"][trace.tables["exchanges"]["batch_size"] > 0]
        start = np.zeros(2, trace.tables["starts"].dtype)
        start["start"] = 0, 1
        for before, expected in ((1, set()), (2, {END})):
            last = steps["now_s"][steps["iteration"] == steps["iteration"].max() - before]
            start["now_s"] = 0.0, last.max()
            assert failing(with_rows(trace, "starts", start)) == expected


def test_synchronous_workers_end_after_the_same_iteration(traces):
    trace = traces["local-sgd"]
    rows = trace.tables["exchanges"]
    most = int(rows["iteration"].max())
    last = find(trace, iteration=most, worker=0)
    assert END in failing(remove(trace, "exchanges", last))


@pytest.fixture(scope="module")
def shared():
    """A trace of all-reduce with speeds 1 : 2 : 4 whose second worker leaves before iteration 14."""
    return record("allreduce", (1.0, 2.0, 4.0), samples=720, jitter=0.0, leave={1: 14}, batches=BATCHES)


def rows_of(trace, iteration):
    return np.flatnonzero(trace.tables["decisions"]["iteration"] == iteration)


def with_settings(trace, **settings):
    """Return the trace as if its job had these settings of batches."""
    changed = trace.job.model_copy(update={"batches": trace.job.batches.model_copy(update=settings)})
    return dataclasses.replace(trace, attributes={**trace.attributes, **attributes(changed)})


def test_the_trace_to_be_damaged_is_right(shared):
    assert failing(shared) == set()
    assert sorted(set(shared.tables["decisions"]["iteration"].tolist())) == [4, 14]
    assert {ROWS, SIZES, FOLLOW, DUE} <= {check.name for check in audit(shared)}


@pytest.mark.parametrize(
    "values",
    [
        {"worker": 3}, {"worker": -1}, {"controller": b"k"}, {"now_s": math.nan}, {"chosen": 0.0}, {"chosen": 7.5},
        {"chosen": math.nan}, {"batch_before": math.inf}, {"iteration": 0.0}, {"iteration": math.nan},
        {"fixed_s": -0.1}, {"sample_s": 0.0}, {"sample_s": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_decisions_are_the_only_failure_of_sizes(shared, values):
    damaged = edit(shared, "decisions", 1, **values)
    assert failing(damaged) == {ROWS}
    assert not {SIZES, FOLLOW, DUE} & {check.name for check in audit(damaged)}
    lacking = shared.tables["decisions"][["seq", "now_s", "controller", "worker", "chosen"]]
    assert failing(with_rows(shared, "decisions", lacking)) == {ROWS}


def test_sizes(shared):
    """Two workers swap their sizes."""
    rows = shared.tables["exchanges"].copy()
    two = [find(shared, iteration=9, worker=worker) for worker in (0, 2)]
    rows["batch_size"][two] = rows["batch_size"][two[::-1]]
    assert failing(with_rows(shared, "exchanges", rows)) == {SIZES}
    equal = record("allreduce", (1.0, 2.0, 4.0), samples=720, jitter=0.0, leave={1: 14})
    assert failing(dataclasses.replace(equal, attributes=shared.attributes)) >= {ROWS}


def test_agreed_sizes_add_up_to_the_total(shared):
    """A worker is allocated one sample more, and computes it."""
    decisions, rows = shared.tables["decisions"].copy(), shared.tables["exchanges"].copy()
    row = rows_of(shared, 4)[0]
    decisions["chosen"][row] += 1
    own, then = rows["worker"] == decisions["worker"][row], (rows["iteration"] > 4) & (rows["iteration"] < 15)
    rows["batch_size"][own & then] += 1
    changed = with_rows(with_rows(shared, "decisions", decisions), "exchanges", rows)
    details = {check.name: check.detail for check in audit(changed) if not check.passed}
    assert details[SIZES].startswith("iteration 5 of 3 workers has 25 samples, not 24")


@pytest.mark.parametrize(("column", "factor"), [("fixed_s", 9.0), ("sample_s", 1.5), ("gain", 1.001)])
def test_sizes_follow_from_the_predicted_times(shared, column, factor):
    rows = shared.tables["decisions"]
    assert failing(edit(shared, "decisions", 0, **{column: rows[column][0] * factor})) == {FOLLOW}


def test_sizes_follow_from_the_ones_before_and_from_the_job(shared):
    assert failing(edit(shared, "decisions", 0, batch_before=9.0)) == {FOLLOW}
    assert failing(with_settings(shared, gain=0.9)) == {FOLLOW}
    assert failing(with_settings(shared, policy="proportional")) == {FOLLOW}
    assert failing(with_settings(shared, minimum=6)) == {FOLLOW}
    unknown = edit(shared, "decisions", 0, fixed_s=math.nan, sample_s=math.nan)
    assert failing(unknown) == {FOLLOW}


def test_sizes_are_agreed_on_when_due(shared):
    assert failing(with_settings(shared, interval=5)) == {DUE}
    assert failing(with_settings(shared, interval=2)) == set()  # some allocations may have had no gain
    late = shared.tables["decisions"].copy()
    late["now_s"][rows_of(shared, 4)] += 100.0
    assert failing(with_rows(shared, "decisions", late)) == {DUE}
    early = shared.tables["decisions"].copy()
    early["now_s"][rows_of(shared, 4)] *= 0.9
    assert failing(with_rows(shared, "decisions", early)) == {DUE}
    last = shared.tables["decisions"].copy()
    last["iteration"][rows_of(shared, 14)] = shared.tables["exchanges"]["iteration"].max()
    assert failing(with_rows(shared, "decisions", last)) == {SIZES, DUE}
    last["iteration"][rows_of(shared, 14)] = 10**6
    assert failing(with_rows(shared, "decisions", last)) == {SIZES, DUE}


@pytest.mark.parametrize(
    ("iteration", "gain", "detail"),
    [(4, math.nan, "0 workers have left, it must be for one"), (14, 0.5, "workers [1] are left out")],
)
def test_sizes_are_agreed_on_for_one_departure_or_for_none(shared, iteration, gain, detail):
    rows = shared.tables["decisions"].copy()
    rows["gain"][rows_of(shared, iteration)] = gain
    details = {check.name: check.detail for check in audit(with_rows(shared, "decisions", rows)) if not check.passed}
    assert detail in details[DUE]


def test_sizes_are_agreed_on_once(shared):
    changed = with_settings(shared, interval=2)
    first, last = (shared.tables["decisions"][rows_of(shared, iteration)] for iteration in (4, 14))
    steps = shared.tables["exchanges"]
    second_s = steps["now_s"][steps["iteration"] == 2].max()
    for iteration, now_s in ((2, second_s), (4, first["now_s"])):
        again = first.copy()
        again["iteration"], again["now_s"] = iteration, now_s
        twice = with_rows(changed, "decisions", np.concatenate([first, again, last]))
        details = {check.name: check.detail for check in audit(twice) if not check.passed}
        assert "it follows an allocation of iteration 4" in details[DUE]


def test_the_samples_of_a_worker_that_left_are_taken_over(shared):
    kept = np.delete(shared.tables["decisions"], rows_of(shared, 14))
    damaged = with_rows(shared, "decisions", kept)
    damaged = with_rows(damaged, "membership", _renumbered(damaged))
    assert failing(damaged) == {SIZES, DUE}
    assert any("took over" in check.detail for check in audit(damaged))


def _renumbered(trace):
    rows = trace.tables["membership"].copy()
    free = set(range(1, 100)) - set(trace.tables["decisions"]["seq"].tolist())
    rows["seq"] = sorted(free)[: len(rows)]
    return rows


def test_decisions_and_departures_are_numbered_together(shared):
    assert failing(edit(shared, "decisions", 0, seq=50)) == {LEFT}


def test_samples_of_different_sizes_end_the_run(shared):
    stop = shared.job.stop.model_copy(update={"samples": 600})
    changed = shared.job.model_copy(update={"stop": stop})
    assert failing(dataclasses.replace(shared, attributes={**shared.attributes, **attributes(changed)})) == {END}


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_reported_and_never_raises(seed):
    rng = np.random.default_rng(seed)
    paradigm = rng.choice([*PARADIGMS, "batches"])
    if shares := paradigm == "batches":
        trace = record("allreduce", leave={0: 3}, batches=BATCHES)
    else:
        trace = record(paradigm, leave={0: 3})
    for _ in range(rng.integers(1, 4)):
        table = rng.choice(["exchanges", "updates", "membership", "evaluations", "clocks", *["decisions"] * 3 * shares])
        rows = trace.tables[table].copy()
        kind = rng.integers(4)
        if kind == 0:
            rows = np.delete(rows, rng.integers(len(rows), size=2))
        elif kind == 1:
            rows = rows[rng.permutation(len(rows))]
        elif kind == 2:
            rows = np.concatenate([rows, rows[rng.integers(len(rows), size=2)]])
        else:
            columns = [name for name in rows.dtype.names if name not in ("host", "controller")]
            rows[rng.choice(columns)] = rng.integers(0, 5, len(rows))
        trace = with_rows(trace, table, rows)
        if not len(rows):
            break
    for status in ("finished", "running"):
        assert audit(with_status(trace, status))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_file_is_audited(tmp_path):
    job = peer_job("push-sum")
    with TraceWriter(tmp_path / "t.h5", attributes(job)) as trace:
        for table, row in simulated(job):
            trace.append(table, row)
    console = Console(width=80, color_system=None, record=True)
    assert main(tmp_path / "t.h5", console) == 0
    shown = console.export_text()
    rows = reader.load(tmp_path / "t.h5").tables["exchanges"]
    assert f"gossip, {(rows['batch_size'] > 0).sum()} iterations: all 24 checks passed" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("paradigm", ["push", "push-sum"])
def test_models_are_received_by_the_workers_to_which_they_were_sent(traces, paradigm):
    trace = traces[paradigm]
    rows = trace.tables["exchanges"]
    row = int(np.flatnonzero(rows["n_received"] > 0)[-1])
    other = int(np.flatnonzero((rows["worker"] != rows["worker"][row]) & (rows["n_received"] > 0))[-1])
    moved = edit(trace, "exchanges", row, n_received=rows["n_received"][row] - 1)
    moved = edit(moved, "exchanges", other, n_received=rows["n_received"][other] + 1)
    assert SENT in failing(moved), "as many in all"


@pytest.mark.parametrize("paradigm", ["push", "push-sum"])
def test_a_worker_that_has_ended_computes_nothing(traces, paradigm):
    trace = traces[paradigm]
    row = int(np.flatnonzero(trace.tables["exchanges"]["batch_size"] == 0)[-1])
    rest = trace.tables["exchanges"][row]
    others = {"iteration": rest["iteration"] + 1, "begin_s": rest["begin_s"] - 1.0, "loss": 0.0, "problem": 2}
    for column, value in {**others, **dict.fromkeys(("compute_s", "wait_s", "comm_s", "load_s"), 1.0)}.items():
        assert ITERATIONS in failing(edit(trace, "exchanges", row, **{column: value})), column


def test_departures_are_in_the_order_of_their_times(traces):
    trace = traces["push"]
    now_s = trace.tables["membership"]["now_s"]
    name = "no worker acts after it leaves"
    assert name in failing(edit(trace, "membership", 0, now_s=now_s[1] + 1.0))
