"""Negative controls: one value of a correct trace is changed, and exactly the expected checks must fail.

The expected checks are spelled out, including replay and bounds: one that fails unexpectedly tells as much as one that
passes.
"""

import numpy as np
import pytest

from hpcsync.audit.trace_audit import audit
from hpcsync.trace.schema import TABLES as SCHEMA
from hpcsync.trace.schema import Change, Outcome
from tests.unit.audit.failing import failing
from tests.unit.trace.recorder import edit, record, remove, with_rows, with_status

REPLAY_GRANTS = "replay gives the same grants"
REPLAY_UPDATES = "replay gives the same updates"
POSSIBLE = "values are valid"
SEQ = "seq numbers each row once"
TIMES = "times never decrease"
ITERATIONS = "iteration is the worker's push count"
GRANTED = "each push is answered by exactly one grant"
READ = "version_read is the granted version"
CURRENT = "each grant names the current version"
UPDATES = "updates consist of the applied pushes"
STALENESS = "staleness equals the recount"
SAMPLES = "sample counts add up"
EVALUATED = "evaluations come when they are due"
BLOCKED = "held_s is the time from push to grant"
LEAD = "gap_iters equals the recount"
LEAVING = "no worker acts after it leaves"
END = "stop grants end the run"
SLOWEST = "the slowest worker is never blocked"
SINGLE = "an update is of one push"
WEIGHTS = "weights follow from batch sizes"
START_LEAD = "start lead is at most 2"


def find(trace, table, **values):
    """Return the only row with these values."""
    rows = trace.tables[table]
    (row,) = np.flatnonzero(np.logical_and.reduce([rows[column] == value for column, value in values.items()]))
    return row


@pytest.fixture(scope="module")
def ssp():
    """A trace that ends with two dropped pushes, each answered by a stop grant."""
    trace = record("ssp", jitter=0.3, updates=41)
    assert trace.tables["pushes"]["outcome"][-3:].tolist() == [0, 1, 1]
    return trace


@pytest.fixture(scope="module")
def parting():
    """A trace of SSP whose worker 1 leaves instead of its 5th push."""
    return record("ssp", jitter=0.3, leave={1: 5})


@pytest.fixture(scope="module")
def returning():
    """A trace of SSP whose worker 1 leaves instead of its 5th push, joins, dies and joins again."""
    return record("ssp", jitter=0.3, leave={1: 5}, changes=[(17.0, 1), (30.0, 1), (33.0, 1)])


def test_the_traces_themselves_pass(ssp, parting, returning):
    assert failing(ssp) == failing(parting) == failing(returning) == set()
    assert returning.tables["membership"]["change"][:4].tolist() == [
        Change.LEFT,
        Change.JOINED,
        Change.DIED,
        Change.JOINED,
    ]


# ---- values and numbering --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("pushes", {"worker": 3}),
        ("pushes", {"worker": -1}),
        ("pushes", {"outcome": 2}),
        ("pushes", {"iteration": 0}),
        ("pushes", {"version_read": -1}),
        ("pushes", {"batch_size": 0}),
        ("pushes", {"local_steps": 0}),
        ("pushes", {"wait_s": -0.1}),
        ("pushes", {"comm_s": np.nan}),
        ("pushes", {"end_s": -1.0}),
        ("pushes", {"now_s": np.inf}),
        ("pushes", {"share": 0.0}),
        ("pushes", {"share": 1.01}),
        ("pushes", {"weight": -0.1}),
        ("pushes", {"weight": np.nan}),
        ("pushes", {"weight": np.inf}),
        ("pushes", {"predicted_sample_s": 0.1}),
        ("pushes", {"predicted_fixed_s": 0.1, "predicted_sample_s": 0.0}),
        ("pushes", {"predicted_fixed_s": np.inf, "predicted_sample_s": 0.1}),
        ("grants", {"first_sample": -2}),
        ("grants", {"worker": 3}),
        ("grants", {"batch_size": 0}),
        ("grants", {"batch_size": -1}),
        ("updates", {"n_contributions": 0}),
        ("updates", {"now_s": np.nan}),
    ],
)
def test_impossible_values(ssp, table, values):
    *of_the_file, check = audit(edit(ssp, table, 7, **values))
    assert check.name == POSSIBLE and not check.passed
    assert f"/{table} row 7" in check.detail
    assert len(of_the_file) == 4 and all(other.passed for other in of_the_file), "no other check can use the values"


def test_an_unknown_change(parting):
    assert failing(edit(parting, "membership", 0, change=7)) == {POSSIBLE}


def test_a_number_that_occurs_twice(ssp):
    # A push has the number of the grant that answers it; only the numbering is wrong.
    push = ssp.tables["pushes"][9]
    grant = find(ssp, "grants", worker=push["worker"], iteration=push["iteration"] + 1)
    twice = edit(ssp, "evaluations", 0)
    twice = edit(twice, "grants", grant, seq=push["seq"])
    assert SEQ in failing(twice)


def test_numbers_with_a_gap(ssp):
    shifted = ssp
    for table in ("pushes", "grants", "decisions", "membership"):
        rows = shifted.tables[table].copy()
        rows["seq"][rows["seq"] > 30] += 1
        if table == "grants":
            rows["released_by"][rows["released_by"] > 30] += 1
        shifted = with_rows(shifted, table, rows)
    assert failing(shifted) == {SEQ}


def test_grants_in_the_wrong_order_of_rows(ssp):
    rows = ssp.tables["grants"].copy()
    rows[[3, 4]] = rows[[4, 3]]
    assert failing(with_rows(ssp, "grants", rows)) == {SEQ}


def test_the_order_of_two_pushes_swapped(ssp):
    # Two workers' pushes swap their numbers.
    seqs = ssp.tables["pushes"]["seq"]
    swapped = edit(edit(ssp, "pushes", 5, seq=seqs[6]), "pushes", 6, seq=seqs[5])
    names = failing(swapped)
    assert {REPLAY_GRANTS, TIMES, GRANTED} <= names
    assert SEQ not in names


# ---- times -----------------------------------------------------------------------------------------------------------


def test_an_update_before_its_contribution(ssp):
    assert failing(edit(ssp, "updates", 6, now_s=ssp.tables["updates"]["now_s"][5])) == {TIMES}


def test_an_update_after_the_grant_that_names_it(ssp):
    # The last update: no later one contradicts its time.
    last_s = ssp.tables["updates"]["now_s"][-1]
    assert failing(edit(ssp, "updates", -1, now_s=last_s + 1e-9)) == {TIMES, SAMPLES}, "its evaluation is earlier"


def test_an_update_after_the_next_one():
    # The first two workers' pushes are applied but not granted until the third one pushes, 3 s after the start.
    trace = record('name = "ssp"\nstaleness = 0', (1.0, 2.0, 3.0))
    assert trace.tables["updates"]["now_s"][:3].tolist() == [1.0, 2.0, 3.0]
    later = edit(trace, "updates", 0, now_s=2.5)
    assert failing(later) == {TIMES}
    assert failing(edit(later, "updates", 1, now_s=2.5)) == set()


def test_a_decision_in_the_past():
    trace = record("dssp", jitter=0.3)
    assert failing(edit(trace, "decisions", 3, now_s=0.0)) == {TIMES}


# ---- pushes and grants -----------------------------------------------------------------------------------------------


def test_an_iteration_left_out(ssp):
    # The last push: no grant and no later push depends on its number.
    trace = with_status(ssp, "failed")
    trace = remove(trace, "grants", -1)
    assert failing(trace) == set()
    last = trace.tables["pushes"]["iteration"][-1]
    assert failing(edit(trace, "pushes", -1, iteration=last + 5)) == {ITERATIONS}


def test_a_grant_removed(ssp):
    names = failing(remove(ssp, "grants", 8))
    assert {REPLAY_GRANTS, SEQ, GRANTED} <= names
    assert not names & {STALENESS, SAMPLES, UPDATES, BLOCKED, LEAD, TIMES, ITERATIONS}


def test_a_grant_removed_and_the_rest_renumbered(ssp):
    trace, seq = remove(ssp, "grants", 8), ssp.tables["grants"]["seq"][8]
    for table in ("pushes", "grants", "membership"):
        rows = trace.tables[table].copy()
        rows["seq"][rows["seq"] > seq] -= 1
        trace = with_rows(trace, table, rows)
    names = failing(trace)
    assert {REPLAY_GRANTS, GRANTED} <= names
    assert SEQ not in names


def test_a_second_grant_for_one_push(ssp):
    # At the end, where only the departure of its worker follows.
    rows, left = ssp.tables["grants"], ssp.tables["membership"]["seq"][-1]
    again = rows[-1:].copy()
    again["seq"] += 1
    assert again["seq"] == left
    later = edit(ssp, "membership", -1, seq=left + 1)
    assert failing(with_rows(later, "grants", np.concatenate([rows, again]))) == {REPLAY_GRANTS, GRANTED}


def test_a_grant_for_another_iteration(ssp):
    row = len(ssp.tables["grants"]) - 1
    wrong = ssp.tables["grants"]["iteration"][row] + 5
    names = failing(edit(ssp, "grants", row, iteration=wrong))
    assert names == {REPLAY_GRANTS, GRANTED}


# ---- versions and staleness ------------------------------------------------------------------------------------------


def test_another_version_read(ssp):
    # Staleness is changed accordingly, so that only the grant is contradicted.
    push = ssp.tables["pushes"][12]
    changed = edit(ssp, "pushes", 12, version_read=push["version_read"] - 1, staleness=push["staleness"] + 1)
    assert failing(changed) == {READ}


def test_a_first_iteration_that_read_another_version_than_0(ssp):
    row = find(ssp, "pushes", worker=2, iteration=1)
    staleness = ssp.tables["pushes"]["staleness"][row]
    assert failing(edit(ssp, "pushes", row, version_read=1, staleness=staleness - 1)) == {READ}


def test_a_grant_of_a_version_that_is_not_current(ssp):
    # A stop grant: no worker reads the version that it names.
    version = ssp.tables["grants"]["version"][-1]
    assert failing(edit(ssp, "grants", -1, version=version - 1)) == {REPLAY_GRANTS, CURRENT}


def test_a_wrong_staleness(ssp):
    assert failing(edit(ssp, "pushes", 12, staleness=ssp.tables["pushes"]["staleness"][12] + 1)) == {STALENESS}


def test_a_wrong_staleness_of_a_dropped_push(ssp):
    row = np.flatnonzero(ssp.tables["pushes"]["outcome"])[0]
    assert failing(edit(ssp, "pushes", row, staleness=ssp.tables["pushes"]["staleness"][row] - 1)) == {STALENESS}


def test_a_wrong_version_number(ssp):
    assert failing(edit(ssp, "updates", 4, version=4)) == {UPDATES}


def test_a_dropped_push_called_applied(ssp):
    row = np.flatnonzero(ssp.tables["pushes"]["outcome"])[-1]
    names = failing(edit(ssp, "pushes", row, outcome=0))
    assert {UPDATES, END} <= names <= {UPDATES, END, REPLAY_UPDATES, STALENESS, SINGLE}


# ---- samples, evaluations, waiting -----------------------------------------------------------------------------------


def test_a_wrong_batch_size(ssp):
    assert failing(edit(ssp, "pushes", 5, batch_size=9)) == {SAMPLES, REPLAY_GRANTS, WEIGHTS}


@pytest.mark.parametrize("paradigm", ["asp", "dssp", "k-batch-sync", "async-diloco"])
def test_a_push_has_the_granted_steps_and_their_samples_also_if_it_is_dropped(paradigm):
    trace = record(paradigm, jitter=0.3)
    assert failing(trace) == set()
    pushes = trace.tables["pushes"]
    rows = np.flatnonzero(pushes["outcome"] == Outcome.DROPPED)
    assert len(rows)
    for row in rows:
        batch_size, steps = (int(pushes[column][row]) for column in ("batch_size", "local_steps"))
        for other in (batch_size + 1, steps), (batch_size, steps + 1), (batch_size // steps * (steps + 1), steps + 1):
            columns = dict(zip(("batch_size", "local_steps"), other, strict=True))
            assert SAMPLES in failing(edit(trace, "pushes", row, **columns))


def test_a_wrong_sum_of_samples(ssp):
    row = len(ssp.tables["updates"]) - 2  # not evaluated
    assert failing(edit(ssp, "updates", row, samples=1)) == {SAMPLES}


@pytest.mark.parametrize(
    "values", [{"samples": 41}, {"version": 99, "samples": 0}, {"version": -1, "samples": 0}, {"now_s": 0.0}]
)
def test_an_evaluation_of_no_update(ssp, values):
    assert {SAMPLES} <= failing(edit(ssp, "evaluations", 0, **values)) <= {SAMPLES, EVALUATED}


def test_a_wrong_held_s(ssp):
    row = np.flatnonzero(ssp.tables["grants"]["held_s"] > 0)[0]
    assert failing(edit(ssp, "grants", row, held_s=0.001)) == {REPLAY_GRANTS, BLOCKED}


def test_a_wrong_gap_iters(ssp):
    gap_iters = ssp.tables["grants"]["gap_iters"][9]
    assert failing(edit(ssp, "grants", 9, gap_iters=gap_iters - 1)) == {REPLAY_GRANTS, LEAD}


# ---- departures and the end ------------------------------------------------------------------------------------------


def test_another_worker_left(parting):
    names = failing(edit(parting, "membership", 0, worker=0))
    assert {REPLAY_GRANTS, LEAVING, END} <= names


def test_a_wrong_join(returning):
    (first, second) = np.flatnonzero(returning.tables["membership"]["change"] == Change.JOINED)
    # Its iterations and all leads then are those of an active worker.
    assert LEAVING in failing(edit(returning, "membership", first, change=Change.LEFT))
    assert {LEAVING, REPLAY_GRANTS} <= failing(edit(returning, "membership", second, change=Change.DIED))
    assert {LEAVING, SEQ} <= failing(remove(returning, "membership", first))
    joined = returning.tables["membership"][first]
    (grant,) = np.flatnonzero(returning.tables["grants"]["seq"] == joined["seq"] + 1)
    assert failing(edit(returning, "membership", first, worker=0)) >= {LEAVING, REPLAY_GRANTS}
    # No worker blocks for the iterations that it missed, but its count is no higher than the slowest's.
    gap_iters = returning.tables["grants"]["gap_iters"][grant]
    assert gap_iters == 0 < returning.tables["grants"]["iteration"][:grant].max() - joined["worker"]
    assert failing(edit(returning, "grants", grant, gap_iters=1)) == {REPLAY_GRANTS, LEAD}
    assert failing(edit(returning, "grants", grant, held_s=0.5)) == {REPLAY_GRANTS, BLOCKED}
    # Its iterations continue where they were: one that was granted but not pushed is granted again.
    iteration = returning.tables["grants"]["iteration"][grant]
    assert iteration == 5
    assert failing(edit(returning, "grants", grant, iteration=6)) == {REPLAY_GRANTS, GRANTED}
    assert GRANTED in failing(remove(returning, "grants", grant))


def test_iterations_are_not_left_out_after_a_join(returning):
    trace = returning
    for row in np.flatnonzero((trace.tables["pushes"]["worker"] == 1) & (trace.tables["pushes"]["iteration"] >= 5)):
        trace = edit(trace, "pushes", row, iteration=trace.tables["pushes"]["iteration"][row] + 1)
    assert ITERATIONS in failing(trace)


def test_a_join_after_the_end(ssp):
    rows = ssp.tables["membership"]
    joins = np.array([(rows["seq"][-1] + 1, 999.0, 0, Change.JOINED)], SCHEMA["membership"])
    assert {END, REPLAY_GRANTS} <= failing(with_rows(ssp, "membership", np.concatenate([rows, joins])))


def test_a_worker_that_leaves_twice(ssp):
    trace = record("ssp", leave={0: 3, 1: 3, 2: 3})  # ends with departures
    rows = trace.tables["membership"]
    again = rows[-1:].copy()
    again["seq"] += 1
    assert LEAVING in failing(with_rows(trace, "membership", np.concatenate([rows, again])))


def test_a_stop_with_credits(ssp):
    assert failing(edit(ssp, "grants", -1, credits=1)) == {REPLAY_GRANTS, END}


def test_a_push_after_a_stop_grant(ssp):
    # It is dropped, as all pushes at the end are.
    rows, stop = ssp.tables["pushes"], ssp.tables["grants"][-1]
    late = rows[rows["worker"] == stop["worker"]][-1:].copy()
    late["seq"], late["iteration"] = stop["seq"] + 1, stop["iteration"]
    later = edit(ssp, "membership", -1, seq=stop["seq"] + 2)
    assert END in failing(with_rows(later, "pushes", np.concatenate([rows, late])))


def test_a_worker_that_continues_after_the_end(ssp):
    assert failing(edit(ssp, "grants", -1, batch_size=8, local_steps=1)) == {REPLAY_GRANTS, END}


def test_a_finished_trace_that_lacks_its_end(ssp):
    # The last push, its stop grant and the departure of its worker are removed; no other row refers to them.
    trace = remove(ssp, "membership", -1)
    assert failing(trace) == {END}
    for shorter in (trace, remove(remove(trace, "grants", -1), "pushes", -1)):
        assert failing(shorter) == {END}
        assert failing(with_status(shorter, "failed")) == set()


def test_a_blocked_worker_without_its_stop_grant():
    # Stopped from outside while worker 0 is blocked by worker 1.
    trace = record('name = "ssp"\nstaleness = 0', (1.0, 10.0), stop_s=5.0)
    grants = trace.tables["grants"]
    assert grants["worker"].tolist() == [0, 1]
    # The replay sees a run that continues until a push is dropped that it would apply.
    assert failing(remove(trace, "grants", 0)) == {REPLAY_UPDATES, SEQ, SLOWEST}


# ---- unfinished traces: rows that may be missing at the end ----------------------------------------------------------


def test_a_gap_in_an_unfinished_trace_is_found(ssp):
    trace = with_status(ssp, "running")
    for table in ("pushes", "grants"):
        row = len(trace.tables[table]) // 2
        assert SEQ in failing(remove(trace, table, row))


def test_pending_contributions_are_missing_only_at_the_end():
    trace = record("bsp", jitter=0.3)
    last_round = trace.tables["grants"]["iteration"] == 40
    cut_seq = trace.tables["grants"]["seq"][last_round][-1]
    running = with_status(trace, "running")
    for table in ("pushes", "grants"):
        rows = running.tables[table]
        running = with_rows(running, table, rows[rows["seq"] <= cut_seq])
    evaluations, updates = running.tables["evaluations"], running.tables["updates"]
    running = with_rows(running, "evaluations", evaluations[evaluations["version"] <= 39])
    assert failing(with_rows(running, "updates", updates[:39])) == set()
    assert failing(with_rows(running, "updates", updates)) == set(), "the row of an update comes before its pushes'"
    assert UPDATES in failing(with_rows(running, "updates", updates[:38]))


def test_other_checks_of_an_unfinished_trace(ssp):
    trace = with_status(ssp, "running")
    assert failing(edit(trace, "pushes", 12, staleness=99)) == {STALENESS}
    assert failing(edit(trace, "grants", 9, held_s=99.0)) == {REPLAY_GRANTS, BLOCKED}
