"""Negative controls of contribution weights, batch sizes and allocated samples."""

import numpy as np
import pytest

from hpcsync.audit.batches import check_sizes
from hpcsync.audit.server_recount import Recount
from hpcsync.trace.schema import Outcome
from tests.unit.audit.failing import failing
from tests.unit.recorder import Recorder
from tests.unit.trace.recorder import (
    BATCHES,
    PARADIGMS,
    as_trace,
    edit,
    job_of,
    play,
    record,
    remove,
    with_job,
)

WEIGHTS = "weights follow from batch sizes"
OF_COMMITS = {
    "ashl": "the weight of a commit is its share",
    "ashl-after-gate": "the weight of a commit is its share",
    "adsp": "each commit has weight 1 / n_workers",
    "async-diloco": "weights are shares of the update's samples",
}
SIZES = "batch sizes follow from the predicted times"
ALLOCATED = "each sample is allocated exactly once"
NONE = "no batches are allocated"
SECONDS = (1.0, 1.3, 2.1)


def failing_sizes(trace):
    return failing(trace, check_sizes)


def with_batches(paradigm, **settings):
    text = BATCHES
    for name, value in settings.items():
        text = (
            text.replace(f"{name} = ", f"{name} = {value} # ") if f"{name} = " in text else f"{text}\n{name} = {value}"
        )
    return f"{paradigm}\n{text}"


@pytest.fixture(scope="module")
def uneven():
    """A trace of BSP whose sizes are allocated several times, and again when worker 1 leaves."""
    trace = record(with_batches('name = "bsp"', gain=0.0), SECONDS, jitter=0.4, leave={1: 21})
    assert len(trace.tables["decisions"]) > 10
    assert failing(trace) == set()
    return trace


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_a_wrong_weight(paradigm):
    trace = record(paradigm, jitter=0.3)
    assert failing(trace) == set()
    applied = np.flatnonzero(trace.tables["pushes"]["outcome"] == Outcome.APPLIED)
    for row, phase in zip(applied[[0, 7, -1]], ("bsp", "bsp", "asp"), strict=True):
        name = f"under {phase}: {WEIGHTS}" if paradigm == "sync-switch" else OF_COMMITS.get(paradigm, WEIGHTS)
        weight = trace.tables["pushes"]["weight"][row]
        for other in (weight * (1 + 1e-8), 0.0):
            assert failing(edit(trace, "pushes", row, weight=other)) == {name}


@pytest.mark.parametrize("paradigm", ["k-sync", "k-async", "ssp"])
def test_a_dropped_push_has_no_weight(paradigm):
    trace = record(paradigm, jitter=0.3, updates=41)
    row = np.flatnonzero(trace.tables["pushes"]["outcome"] == Outcome.DROPPED)[0]
    assert failing(edit(trace, "pushes", row, weight=0.1)) == {WEIGHTS}


def test_the_weights_of_one_version_are_shares_of_its_samples(uneven):
    pushes = uneven.tables["pushes"]
    weights = pushes["weight"][pushes["outcome"] == Outcome.APPLIED]
    assert len(set(weights.round(6))) > 5, "an unweighted mean would have the same weights"
    sums = np.bincount(Recount(uneven).applied_version - 1, weights)
    assert sums == pytest.approx(1.0)


def test_weights_across_versions_follow_size_and_staleness():
    trace = record(with_batches('name = "asp"'), (1.0, 2.0, 3.0))
    pushes = trace.tables["pushes"][trace.tables["pushes"]["outcome"] == Outcome.APPLIED]
    assert pushes["weight"] == pytest.approx(pushes["batch_size"] / 8)
    inverse, plain = ('name = "k-async"\nk = 2' + more for more in ('\nstaleness_weight = "inverse"', ""))
    weighted, unweighted = (record(paradigm, (1.0, 1.3, 9.0)) for paradigm in (inverse, plain))
    assert failing_sizes(weighted) == failing_sizes(unweighted) == set()
    assert failing_sizes(with_job(weighted, plain)) == failing_sizes(with_job(unweighted, inverse)) == {WEIGHTS}


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["chosen", "batch_before", "fixed_s", "sample_s", "gain", "worker"])
def test_a_wrong_allocation(uneven, column):
    for row in (0, 4, 7):
        value = uneven.tables["decisions"][column][row]
        tampered = edit(uneven, "decisions", row, **{column: (value + 1) % 3 if column == "worker" else value + 1})
        assert {SIZES, "replay gives the same decisions"} & failing(tampered), row
        assert failing_sizes(tampered) >= {SIZES}, row


@pytest.mark.parametrize("column", ["predicted_fixed_s", "predicted_sample_s"])
def test_a_wrong_prediction(uneven, column):
    decisions, pushes = uneven.tables["decisions"], uneven.tables["pushes"]
    row = np.flatnonzero(pushes["seq"] < decisions["seq"][0])[-1]
    other = edit(uneven, "pushes", row, **{column: pushes[column][row] * 1.001})
    assert failing(other) == {SIZES, "replay gives the same decisions"}


def test_a_missing_allocation(uneven):
    group = np.flatnonzero(uneven.tables["decisions"]["now_s"] == uneven.tables["decisions"]["now_s"][3])
    for row in group[::-1]:
        uneven = remove(uneven, "decisions", row)
    assert failing_sizes(uneven) == {SIZES, ALLOCATED}


@pytest.mark.parametrize("settings", [{"interval": 3}, {"gain": 0.9}, {"maximum": 9}, {"minimum": 7}, {"total": 25}])
def test_an_allocation_of_another_job(uneven, settings):
    text = with_batches('name = "bsp"', **{"gain": 0.0, **settings})
    assert SIZES in failing_sizes(with_job(uneven, text))


def test_a_trace_that_ends_within_an_allocation():
    job, rows = job_of(with_batches('name = "bsp"', interval=1, gain=0.0), updates=4), Recorder()
    fields = play(job, rows, SECONDS, leave={1: 3})
    n_decisions = 0
    for n_rows in range(len(rows.rows) + 1):
        assert failing(as_trace(job, rows.rows[:n_rows], fields, "running")) == set(), n_rows
        n_decisions = sum(table == "decisions" for table, _ in rows.rows[:n_rows])
    assert n_decisions >= 5
    whole = as_trace(job, rows.rows, fields)
    assert SIZES in failing_sizes(remove(whole, "decisions", -1))


def test_fixed_costs_where_sizes_are_proportional_to_speeds(uneven):
    text = with_batches('name = "bsp"', gain=0.0, policy='"proportional"')
    assert failing_sizes(with_job(uneven, text)) == {SIZES}


def test_allocations_without_their_columns():
    assert SIZES in failing(with_job(record("bsp"), with_batches('name = "bsp"')))


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_samples_that_are_allocated_twice_or_never(uneven):
    first = uneven.tables["grants"]["first_sample"]
    for by in (-1, 1):
        other = edit(uneven, "grants", 9, first_sample=first[9] + by)
        assert failing(other) == {ALLOCATED, "replay gives the same grants"}
    begin = uneven.tables["grants"]["batch_size"].astype(np.int64)
    starts = begin > 0
    begins, ends = first[starts], first[starts] + begin[starts]
    assert begins[0] == 24 and (begins[1:] == ends[:-1]).all()


def test_a_grant_of_another_size(uneven):
    size = uneven.tables["grants"]["batch_size"][9]
    assert failing(edit(uneven, "grants", 9, batch_size=size + 1)) == {ALLOCATED, "replay gives the same grants"}


def test_a_push_of_another_size_than_granted(uneven):
    for row in (0, 3, 4, 5, 9):  # the first has no grant, and one of the next three the first grant
        size = uneven.tables["pushes"]["batch_size"][row]
        assert ALLOCATED in failing_sizes(edit(uneven, "pushes", row, batch_size=size + 1))


def test_a_stop_grant_with_samples(uneven):
    assert failing(edit(uneven, "grants", -1, first_sample=7)) == {ALLOCATED, "replay gives the same grants"}


def test_equal_batches_are_not_allocated(uneven):
    trace = record("ssp")
    assert failing(edit(trace, "grants", 5, first_sample=0)) == {NONE, "replay gives the same grants"}
    assert failing(edit(trace, "pushes", 5, predicted_fixed_s=0.0, predicted_sample_s=0.1)) == {NONE}
    assert failing_sizes(with_job(uneven, "bsp")) == {NONE}
