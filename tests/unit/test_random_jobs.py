"""A few jobs of `tests/random_jobs.py`: whatever a job file may say, what is left of its runs is right."""

from __future__ import annotations

from typing import Any

import pytest

from hpcsync.paradigms.asp import ASP
from hpcsync.system import garbage
from tests import random_jobs
from tests.random_jobs import Jobs, examine, on_ranks, simulated
from tests.unit.paradigms.broken import GrantsTwice

SEED, JOBS = 2, 2
ASYNCHRONOUS = """
name = "random"
seed = 3
workload = {name = "linear", batch_size = 4, features = 5, samples = 60}
optimizer = {name = "sgd", lr = 0.02}
stop = {updates = 12}
checkpoint = {updates = 5, keep = 9}
paradigm = {name = "asp"}
cluster = {workers = 2, compute = {model = "constant", seconds = 0.002}}
"""


@pytest.fixture(autouse=True)
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "freeze", lambda: None)  # one process is not at an end after a run


def test_random_jobs() -> None:
    jobs = Jobs(SEED)
    drawn = [jobs.draw() for _ in range(JOBS)]
    assert len({*drawn}) == JOBS
    again = Jobs(SEED)
    assert [again.draw() for _ in range(JOBS)] == drawn
    assert [examine(text, [simulated, on_ranks]) for text in drawn] == [None] * JOBS


@pytest.mark.parametrize("engine", [simulated, on_ranks])
def test_a_paradigm_that_grants_twice_is_found(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    assert examine(ASYNCHRONOUS, [engine]) is None
    monkeypatch.setattr(ASP, "_pushed", GrantsTwice._pushed)
    assert f"{engine.__name__}:" in str(examine(ASYNCHRONOUS, [engine]))


def test_weights_on_ranks_that_are_not_those_of_the_simulation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train = random_jobs.train

    def faster(comm: Any, job: Any, *rest: Any) -> Any:
        return train(comm, job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"lr": 0.03})}), *rest)

    monkeypatch.setattr(random_jobs, "train", faster)
    assert "simulated and on ranks: weights: " in str(examine(ASYNCHRONOUS.replace("asp", "bsp"), [on_ranks]))
    assert examine(ASYNCHRONOUS, [on_ranks]) is None  # they may differ
