"""`released_by`: the event that released each worker, in closed form, and values changed one by one."""

import numpy as np
import pytest

from hpcsync.trace.schema import TABLES, Release, complete
from tests.unit.audit.failing import failing
from tests.unit.trace.recorder import edit, record, with_rows

RELEASED = "released_by is the event that released the worker"


def released_by(trace):
    grants = trace.tables["grants"]
    return grants[grants["local_steps"] != 0]


def test_asp_releases_each_worker_by_its_own_push():
    assert set(released_by(record("asp", jitter=0.3))["released_by"].tolist()) == {Release.OWN}


def test_bsp_releases_all_workers_by_the_last_push_of_the_round():
    trace = record("bsp", jitter=0.3)
    pushes, grants = trace.tables["pushes"], released_by(trace)
    for version in np.unique(grants["version"]):
        last = pushes[pushes["version_read"] == version - 1][-1]
        for grant in grants[grants["version"] == version]:
            own = grant["worker"] == last["worker"]
            assert grant["released_by"] == (Release.OWN if own else last["seq"])


def test_ssp_releases_a_blocked_worker_by_a_push_of_the_slowest():
    trace = record("ssp", jitter=0.3)
    pushes, grants = trace.tables["pushes"], released_by(trace)
    blocked = grants[grants["held_s"] > 0]
    assert len(blocked) > 5
    worker = dict(zip(pushes["seq"].tolist(), pushes["worker"].tolist(), strict=True))
    # The third worker takes longest.
    assert [worker[seq] for seq in blocked["released_by"].tolist()] == [2] * len(blocked)
    assert set(grants["released_by"][grants["held_s"] == 0].tolist()) == {Release.OWN}


def test_a_departure_releases_those_who_waited_for_it():
    trace = record("bsp", jitter=0.3, changes=[(1.9, 2)])
    died = trace.tables["membership"][0]
    assert died["worker"] == 2
    grants = released_by(trace)
    assert set(grants["worker"][grants["released_by"] == died["seq"]].tolist()) == {0, 1}


def test_a_time_that_elapsed_releases_the_rest_of_a_quorum():
    trace = record("async-diloco", jitter=0.3)
    decisions, grants = trace.tables["decisions"], released_by(trace)
    elapsed = decisions["seq"][decisions["controller"] == b"elapsed"]
    assert len(elapsed)
    assert np.isin(elapsed, grants["released_by"]).any()
    assert failing(trace) == set()


def test_the_end_of_the_run_is_no_event():
    trace = record("bsp", stop_s=20.0)
    grants = trace.tables["grants"]
    stops = grants["released_by"][grants["local_steps"] == 0]
    assert set(stops.tolist()) <= {Release.END, Release.OWN}
    assert Release.END in stops


def test_a_push_after_the_end_releases_its_own_worker():
    trace = record("asp", jitter=0.3)
    grants = trace.tables["grants"]
    stops = np.flatnonzero(grants["local_steps"] == 0)
    assert grants["released_by"][stops[1:]].tolist() == [Release.OWN] * 2
    for row in stops[1:]:
        assert failing(edit(trace, "grants", row, released_by=Release.END)) == {RELEASED}


@pytest.mark.parametrize("paradigm", ["bsp", "ssp", "dssp", "asp"])
@pytest.mark.parametrize("how", ["other", "own", "end", "unknown"])
def test_another_release_is_caught(paradigm, how):
    trace = record(paradigm, jitter=0.3)
    rows = trace.tables["grants"]
    for row in (5, len(released_by(trace)) - 1):
        before = int(rows["released_by"][row])
        value = {"other": max(before, 1) + 1, "own": Release.OWN, "end": Release.END, "unknown": Release.UNKNOWN}[how]
        if value != before:
            assert failing(edit(trace, "grants", row, released_by=value)) == {RELEASED}


def test_grants_of_format_version_7_name_nothing():
    trace = record("ssp", jitter=0.3)
    rows = trace.tables["grants"]
    older = rows[[name for name in rows.dtype.names if name != "released_by"]].copy()
    trace = with_rows(trace, "grants", complete(older, TABLES["grants"]))
    assert set(trace.tables["grants"]["released_by"].tolist()) == {Release.UNKNOWN}
    assert failing(trace) == {RELEASED}
    trace.attributes["format_version"] = 7
    assert failing(trace) == set()
