"""Audits of runs with separated layers.

Correct traces pass, wherever they end. After one change exactly the expected checks fail.
"""

import dataclasses
import math

import numpy as np
import pytest

from hpcsync.audit import stanza
from hpcsync.audit.peer_recount import PeerRecount
from hpcsync.audit.stanza import batches_are_of_the_groups, both_sides_wait
from hpcsync.audit.trace_audit import audit
from hpcsync.audit.training import losses_have_their_problems
from hpcsync.config.job import Script
from hpcsync.config.workloads import Function
from hpcsync.paradigms.records import ALL_PEERS, Problem
from hpcsync.planning.split_cost import SEPARATED
from tests.unit.audit.failing import failing
from tests.unit.trace.peer_recorder import in_memory, peer_job, simulated
from tests.unit.trace.recorder import as_trace, attributes, edit, with_rows, with_status

TIMING = {"name": "timing", "batch_size": 4, "parameters": 1000, "classifier": 799, "activations": 30}
SIZES = dict(zip(SEPARATED, (4 * 201, 4 * 799, 4 * 30, 8), strict=True))

POSSIBLE = "values are valid"
TIMES = "times are in order"
PEERS = "peers follow from the job and its seed"
SENT = "as many models are received as sent"
EQUAL = "exchanges of one kind have equal wire_bytes"
UPDATES = "updates are the workers' steps"
SAMPLES = "sample counts add up"
IN_STEP = "no worker begins before all have exchanged"
END = "the stopping rule ended the run"
BATCHES = "batch sizes match the groups"
LOSSES = "only fully-connected workers have a loss"
UPDATES = "updates are the workers' steps"
PARTS = "iterations last at least as long as their parts"
INPUT = "no worker computes before its input exists"
BYTES = "wire_bytes match the sizes of the layers"


def job(n_workers=5, fc_workers=2, micro_batches=2, **tables):
    """Return a job. By default fully-connected worker 0 serves worker 2, and 1 serves 3 and 4."""
    paradigm = {"name": "stanza", "cut": "classifier", "fc_share": 0.3}
    paradigm |= {"fc_workers": fc_workers, "micro_batches": micro_batches}
    return peer_job(paradigm, (1.0, 1.3, 2.1, 0.7, 1.6)[:n_workers], **{"workload": TIMING, "samples": 120, **tables})


def described(trace):
    return dataclasses.replace(trace, attributes={**trace.attributes, **SIZES})


def record(**how):
    made = job(**how)
    return described(in_memory(made, simulated(made)))


def find(trace, **values):
    rows = trace.tables["exchanges"]
    return int(np.flatnonzero(np.logical_and.reduce([rows[column] == value for column, value in values.items()]))[0])


@pytest.fixture(scope="module")
def trace():
    return record()


HOWS = [
    {},
    {"n_workers": 2, "fc_workers": 1},
    {"n_workers": 5, "fc_workers": 1, "micro_batches": 1},
    {"n_workers": 4, "fc_workers": 2},
    {"network": False, "jitter": 0.0},
    {"stop": {"updates": 7}},
    {"stop": {"seconds": 9.0}},
    {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": {"name": "cosine", "total": 100}}},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_correct_traces_pass(how):
    assert failing(record(**how)) == set()


def test_a_trace_that_ends_after_any_row_passes():
    made = job(samples=60)
    rows = simulated(made)
    for n_rows in range(len(rows) + 1):
        assert failing(described(as_trace(made, rows[:n_rows], status="running"))) == set(), n_rows


def test_check_names_are_unique(trace):
    checks = [check for check in audit(trace) if check.name != "all replicas have equal weights"]
    checks = [check for check in checks if check.name != "evaluations come when they are due"]  # there is none
    assert len({check.name for check in checks}) == len(checks) == 26
    assert all(check.n_checked for check in checks)


# ---- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("worker", "others"), [(0, (2, 1)), (2, (ALL_PEERS, 1, 3)), (4, (0, ALL_PEERS))])
def test_peers(trace, worker, others):
    for other in others:
        assert failing(edit(trace, "exchanges", find(trace, worker=worker, iteration=3), peer=other)) == {PEERS}


@pytest.mark.parametrize(("worker", "n_others"), [(0, 1), (3, 2)])
def test_gradients_come_from_the_group(trace, worker, n_others):
    row = find(trace, worker=worker, iteration=3)
    assert trace.tables["exchanges"]["n_received"][row] == n_others
    for other in (0, n_others + 1, trace.n_workers - 1):
        assert SENT in failing(edit(trace, "exchanges", row, n_received=other)) <= {SENT, EQUAL}
    assert SENT in failing(edit(with_status(trace, "failed"), "exchanges", row, n_received=n_others + 1))


@pytest.mark.parametrize(("worker", "size"), [(0, 4), (1, 8), (3, 4)])
def test_batches(trace, worker, size):
    row = find(trace, worker=worker, iteration=3)
    assert trace.tables["exchanges"]["batch_size"][row] == size
    found = {BATCHES, BYTES} | ({SAMPLES} if worker >= 2 else set())
    for other in (1, size + 4):
        assert found <= failing(edit(trace, "exchanges", row, batch_size=other)) <= found | {END}
    rows = trace.tables["exchanges"].copy()
    rows["batch_size"] *= 2  # equal for all, but not the job's
    assert {BATCHES, BYTES, SAMPLES} <= failing(with_rows(trace, "exchanges", rows))


def test_batches_of_a_script_are_equal():
    trace = record(micro_batches=1)
    script = trace.job.model_copy(update={"workload": Script(name="script")})
    of_script = dataclasses.replace(trace, attributes={**trace.attributes, **attributes(script)})
    assert failing(of_script) == set()
    run = PeerRecount(of_script)
    run.steps = run.steps[run.steps["worker"] == 1]  # that of a batch is known from a worker with two, too
    assert batches_are_of_the_groups(run, of_script.job.groups).passed
    run.steps = run.steps[:0]
    assert batches_are_of_the_groups(run, of_script.job.groups).passed
    row = find(of_script, worker=3, iteration=3)
    assert failing(edit(of_script, "exchanges", row, batch_size=5)) == {BATCHES, BYTES, SAMPLES}
    assert failing(edit(of_script, "exchanges", row, loss=0.5)) == set()  # a script may report any loss


@pytest.mark.parametrize(("early_s", "passed"), [(0.4, True), (0.6, False)])
def test_times_of_a_pair_are_compared_up_to_the_uncertainty_of_both_clocks(trace, early_s, passed):
    for side in (0, 1):
        run = PeerRecount(trace)
        pairs, run.steps, run.uncertain_s = stanza._pairs(run), run.steps.copy(), np.full(len(run.steps), 0.25)
        below, above = pairs.below[0], pairs.above[0]
        possible_s = run.steps["begin_s"][above] + run.steps["compute_s"][above]
        run.steps["end_s"][(below, above)[side]] = (possible_s, run.steps["begin_s"][below])[side] - early_s
        assert both_sides_wait(run, pairs).passed == passed


def test_samples_and_contributions_are_those_of_convolution_workers(trace):
    updates = trace.tables["updates"]
    assert (updates["n_contributions"] == 3).all()
    assert (updates["samples"] == 12 * updates["version"]).all()
    assert failing(edit(trace, "updates", 2, n_contributions=5)) == {UPDATES}
    assert SAMPLES in failing(edit(trace, "updates", 2, samples=2 * updates["samples"][2]))
    both = updates.copy()
    both["samples"] = 24 * updates["version"]  # as if samples of fully-connected workers counted again
    assert SAMPLES in failing(with_rows(trace, "updates", both))


def test_only_fully_connected_workers_have_a_loss(trace):
    assert failing(edit(trace, "exchanges", find(trace, worker=0, iteration=3), loss=0.5)) == set()
    assert failing(edit(trace, "exchanges", find(trace, worker=2, iteration=3), loss=0.5)) == {LOSSES}
    assert failing(edit(trace, "exchanges", find(trace, worker=2, iteration=3), loss=math.inf)) == {LOSSES}


def test_losses_of_fully_connected_workers_are_not_lost():
    trace = record()
    of_function = trace.job.model_copy(update={"workload": Function(name="module:function", batch_size=4)})
    trace = dataclasses.replace(trace, attributes={**trace.attributes, **attributes(of_function)})
    rows = trace.tables["exchanges"].copy()
    rows["loss"][rows["worker"] < 2] = 0.5
    assert losses_have_their_problems(trace, rows).passed
    rows["loss"][find(trace, worker=1, iteration=3)] = math.nan
    assert not losses_have_their_problems(trace, rows).passed
    rows["problem"][find(trace, worker=1, iteration=3)] = Problem.LOSS_NOT_FINITE
    assert losses_have_their_problems(trace, rows).passed


@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("column", ["compute_s", "wait_s", "comm_s"])
def test_iterations_last_at_least_as_long_as_their_parts(trace, worker, column):
    row = find(trace, worker=worker, iteration=3)
    changed = edit(trace, "exchanges", row, **{column: trace.tables["exchanges"][column][row] + 0.01})
    assert PARTS in failing(changed) <= {PARTS, TIMES, INPUT}
    clocks = trace.tables["clocks"].copy()
    clocks["uncertainty_s"] = 0.02
    assert PARTS not in failing(with_rows(changed, "clocks", clocks))


def test_computation_is_no_longer_than_the_iteration(trace):
    rows = trace.tables["exchanges"]
    row = find(trace, worker=2, iteration=3)
    took_s = rows["end_s"][row] - rows["begin_s"][row]
    assert rows["compute_s"][row] < took_s - 0.1
    assert TIMES in failing(edit(trace, "exchanges", row, compute_s=took_s + 0.01))
    assert failing(edit(trace, "exchanges", row, compute_s=0.0)) == set()


@pytest.mark.parametrize(("group", "slower"), [(range(2), 1), (range(2, 5), 2)])
def test_a_group_is_synchronous(trace, group, slower):
    """No worker begins before the slowest of its own group has ended. The other group does not matter."""
    rows = trace.tables["exchanges"]
    latest_s = max(rows["end_s"][find(trace, worker=worker, iteration=3)] for worker in group)
    other = next(worker for worker in group if worker != slower)
    row = find(trace, worker=other, iteration=4)
    begin_s = max(latest_s - 1e-3, rows["end_s"][find(trace, worker=other, iteration=3)])
    assert begin_s < latest_s
    assert failing(edit(trace, "exchanges", row, begin_s=begin_s)) == {IN_STEP}


def test_gradients_arrive_after_they_are_computed(trace):
    rows = trace.tables["exchanges"]
    above, below = find(trace, worker=1, iteration=3), find(trace, worker=4, iteration=3)
    computed_s = rows["begin_s"][above] + rows["compute_s"][above]
    assert rows["end_s"][below] > computed_s
    early = {"end_s": computed_s - 1e-3, "compute_s": 0.0, "wait_s": 0.0}
    assert failing(edit(trace, "exchanges", below, **early)) == {INPUT}


def test_activations_are_used_after_they_are_computed(trace):
    rows = trace.tables["exchanges"]
    above, below = find(trace, worker=0, iteration=1), find(trace, worker=2, iteration=1)
    begin_s = rows["end_s"][above] + 1e-3
    assert begin_s < rows["end_s"][below]
    late = {"begin_s": begin_s, "compute_s": 0.0, "wait_s": 0.0}
    assert failing(edit(trace, "exchanges", below, **late)) == {INPUT}


@pytest.mark.parametrize("worker", range(5))
def test_bytes(trace, worker):
    row = find(trace, worker=worker, iteration=3)
    moved = trace.tables["exchanges"]["wire_bytes"][row]
    assert failing(edit(trace, "exchanges", row, wire_bytes=moved + 4)) == {EQUAL, BYTES}
    rows = trace.tables["exchanges"].copy()
    rows["wire_bytes"][rows["worker"] == worker] += 4  # in every iteration
    assert failing(with_rows(trace, "exchanges", rows)) == {BYTES}


def test_bytes_are_counted_from_the_sizes(trace):
    rows = trace.tables["exchanges"]
    moved = [rows["wire_bytes"][find(trace, worker=worker)] for worker in (0, 1, 2)]
    assert moved == [4 * 120 + 799 * 4, 8 * 120 + 799 * 4, 4 * 128 + 4 * 804 // 3]
    for attribute in SEPARATED:
        other = {**trace.attributes, attribute: SIZES[attribute] + 3}
        assert failing(dataclasses.replace(trace, attributes=other)) == {BYTES}
        lacking = {name: value for name, value in trace.attributes.items() if name != attribute}
        assert failing(dataclasses.replace(trace, attributes=lacking)) == {BYTES}
        assert failing(dataclasses.replace(trace, attributes={**lacking, attribute: "x"})) == {BYTES}


def test_all_workers_make_equally_many_iterations(trace):
    kept = trace.tables["exchanges"]
    kept = np.delete(kept, find(trace, worker=0, iteration=kept["iteration"].max()))
    assert END in failing(with_rows(trace, "exchanges", kept))


def test_an_iteration_without_convolution_workers_is_no_update(trace):
    """As where a script's convolution workers leave the loop before a step."""
    rows = trace.tables["exchanges"]
    kept = with_rows(trace, "exchanges", rows[(rows["iteration"] < rows["iteration"].max()) | (rows["worker"] < 2)])
    assert UPDATES not in failing(with_rows(kept, "updates", trace.tables["updates"][:-1]))
    assert UPDATES in failing(kept)
    assert UPDATES in failing(with_rows(kept, "updates", trace.tables["updates"][:-2]))


def test_unresolved_groups_are_the_only_failure(trace):
    table = trace.attributes["job"].replace("fc_workers = 2", 'fc_workers = "auto"')
    assert failing(dataclasses.replace(trace, attributes={**trace.attributes, "job": table})) == {POSSIBLE}


@pytest.mark.parametrize("seed", range(10))
def test_damage_is_reported_and_never_raises(trace, seed):
    rng = np.random.default_rng(seed)
    for table in ("exchanges", "updates", "clocks"):
        rows = trace.tables[table].copy()
        rows = rows[rng.integers(len(rows), size=rng.integers(len(rows) + 1))]
        columns = [name for name in rows.dtype.names if name != "host"]
        rows[rng.choice(columns)] = rng.integers(0, 5, len(rows))
        for status in ("finished", "running"):
            assert audit(with_status(with_rows(trace, table, rows), status))
