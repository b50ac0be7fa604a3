from __future__ import annotations

import pytest

from hpcsync.bench import decisions
from hpcsync.paradigms import create
from hpcsync.paradigms.events import Decision, Grant


def test_figures_are_positive_and_the_controller_is_consulted():
    figures = decisions.measure(workers=(2, 5), pushes_per_worker=1, repetitions=2)
    assert {figure.what.split(",")[0] for figure in figures} == set(decisions.PARADIGMS)
    assert all(value > 0 for figure in figures for value in figure.values)
    assert next(figure.what for figure in figures if "controller" in figure.what).startswith("dssp, 2 workers, the ")


def test_a_replay_meets_no_illegal_event():
    options = {"staleness_min": 1, "staleness_max": 4}
    events, consulted = decisions.schedule(create("dssp", 4, **options), 400)
    paradigm = create("dssp", 4, **options)
    for event in events:
        paradigm.handle(event)
        paradigm.check()
    assert len(events) == 400
    assert 0 < len(consulted) < 400


def test_without_a_controller_none_is_consulted():
    _, consulted = decisions.schedule(create("ssp", 4, staleness=1), 400)
    assert consulted == set()


@pytest.mark.parametrize(
    ("name", "controllers"), [("ashl", {"stage", "local-steps", "share", "ratio"}), ("adsp", {"reward", "commits"})]
)
def test_measured_schedules_of_commits_have_all_kinds_of_decisions_and_waits(name, controllers):
    options = decisions.PARADIGMS[name]
    events, consulted = decisions.schedule(create(name, 4, **options), 400)
    paradigm, rows, waits = create(name, 4, **options), set(), 0
    for event in events:
        actions = paradigm.handle(event)
        rows |= {action.controller for action in actions if isinstance(action, Decision)}
        waits += any(isinstance(action, Grant) and action.held_s > 0 for action in actions)
    assert rows == controllers
    assert waits > 5
    assert 0 < len(consulted) < 100
