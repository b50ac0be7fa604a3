"""The `[paradigm]` of the job file: defaults, mistakes, and the options of paradigms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job
from hpcsync.paradigms import create
from tests.unit.jobs import make_job, refusal


def job(name: str, **keys: Any) -> Job:
    return make_job(paradigm={"name": name, **keys}, cluster={"workers": 4})


error = partial(refusal, job)


SYNCHRONOUS, ASYNCHRONOUS = ("k-sync", "k-batch-sync"), ("k-async", "k-batch-async")
FAMILY = (*SYNCHRONOUS, *ASYNCHRONOUS)
STAYS: dict[str, Any] = {"k": 3}
CHANGES: dict[str, Any] = {"k": "min"}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    "keys",
    [STAYS, CHANGES, {"k": "state", "k_min": 2}, {"k": "loss", "k_start": 4}, {"k": "min", "k_min": 3, "k_start": 3}],
    ids=str,
)
def test_resolved_jobs_come_back_equal(name: str, keys: dict[str, Any]) -> None:
    found = job(name, **keys)
    assert Job.from_toml(found.to_toml()) == found
    assert Job.from_toml(found.to_toml()).paradigm.options == found.paradigm.options


@pytest.mark.parametrize("staleness_max", [0, 1, 2.5, math.inf])
@pytest.mark.parametrize("keys", [STAYS, CHANGES], ids=str)
def test_a_bound_comes_back_as_it_is(keys: dict[str, Any], staleness_max: float) -> None:
    found = job("k-async", **keys, staleness_max=staleness_max)
    assert Job.from_toml(found.to_toml()) == found
    assert found.paradigm.staleness_max == staleness_max


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_options_of_synchronous_paradigms(name: str) -> None:
    assert job(name, **STAYS).paradigm.options == {"k": 3, "k_start": None, "cancel": "drop"}
    aborting = job(name, **STAYS, cancel="abort", micro_batches=8).paradigm
    assert aborting.options == {"k": 3, "k_start": None, "cancel": "abort"}
    assert (aborting.micro_batches, job(name, **STAYS).paradigm.micro_batches) == (8, 4)
    options = {"k": "min", "k_min": 1, "k_start": 2, "cancel": "drop"}
    assert job(name, **CHANGES, k_start=2).paradigm.options == options


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_options_of_asynchronous_paradigms(name: str) -> None:
    stays = {"k": 3, "k_start": None, "staleness_max": math.inf, "staleness_weight": "none"}
    assert job(name, **STAYS).paradigm.options == stays
    changes = {"k": "min", "k_min": 1, "k_start": None, "staleness_max": None, "staleness_weight": "inverse"}
    assert job(name, **CHANGES).paradigm.options == changes
    asked: dict[str, Any] = {"staleness_max": 5, "staleness_weight": "none"}
    assert job(name, **CHANGES, **asked).paradigm.options == {**changes, **asked}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    ("keys", "k"), [(STAYS, 3), ({**CHANGES, "k_start": 2}, 2), ({"k": "state", "k_min": 2, "k_start": 4}, 4)], ids=str
)
def test_paradigms_of_the_k_family_accept_their_options(name: str, keys: dict[str, Any], k: int) -> None:
    assert create(name, 4, **job(name, **keys).paradigm.options).k == k


def test_the_smallest_k() -> None:
    assert [job("k-sync", **keys).paradigm.smallest_k for keys in (STAYS, CHANGES, {"k": "loss", "k_min": 2})] == [
        3,
        1,
        2,
    ]


# ---- commits ----


def test_ashl_s_defaults() -> None:
    assert job("ashl").paradigm.options == {
        "steps_coarse": 16,
        "steps_fine": 4,
        "staleness": 2,
        "ratio_coarse": 0.05,
        "ratio_fine": 0.1,
        "loss_preset": None,
        "plateau": 0.01,
        "loss": "commits",
        "share": "data",
        "commit": "on-arrival",
        "warmup": 10,
        "profiled": 20,
    }
    assert [job("ashl", steps_coarse=n).paradigm.options["steps_fine"] for n in (1, 3, 4, 5)] == [1, 3, 4, 4]


@pytest.mark.parametrize(("codec", "ratios"), [("top-k", (0.2, 0.1)), ("random-k", (0.2, 0.1)), ("none", (None, None))])
def test_ashl_has_ratios_where_the_compression_takes_one(codec: str, ratios: tuple[float | None, ...]) -> None:
    found = make_job(paradigm={"name": "ashl", "ratio_coarse": 0.2}, compression={"name": codec}).paradigm_options
    assert (found["ratio_coarse"], found["ratio_fine"]) == ratios
    assert {**found, "ratio_coarse": 0.2, "ratio_fine": 0.1} == job("ashl", ratio_coarse=0.2).paradigm.options


def test_options_of_other_paradigms_are_their_tables() -> None:
    assert job("ssp", staleness=3).paradigm_options == {"staleness": 3, "merge": False}


def test_adsp_s_defaults() -> None:
    assert job("adsp").paradigm.options == job("adsp").paradigm_options
    assert job("adsp").paradigm.options == {
        "check_period_s": 60.0,
        "interval_min_s": 10.0,
        "rule": "cumulative",
        "commits": None,
        "search_every_s": 1000.0,
        "loss_rise": 0.3,
        "loss_target": None,
        "loss": "commits",
    }
    found = job("adsp", check_period_s=3).paradigm
    assert (found.interval_min_s, found.search_every_s) == (0.5, 50.0)


COMMITS: list[tuple[str, dict[str, Any]]] = [
    ("ashl", {}),
    ("ashl", {"steps_coarse": 3}),
    ("ashl", {"loss_preset": -1, "share": "equal", "warmup": 0, "profiled": 2, "ratio_fine": 1, "staleness": 0}),
    ("adsp", {}),
    ("adsp", {"check_period_s": 0.7}),
    ("adsp", {"interval_min_s": 60, "commits": 1, "rule": "released", "search_every_s": 1, "loss_target": 0}),
    ("adsp", {"loss": "evaluation", "loss_target": 0.5}),
]


@pytest.mark.parametrize(("name", "keys"), COMMITS, ids=str)
def test_jobs_of_commits_come_back_equal(name: str, keys: dict[str, Any]) -> None:
    found = job(name, **keys)
    assert Job.from_toml(found.to_toml()) == found
    assert Job.from_toml(found.to_toml()).to_toml() == found.to_toml()


@pytest.mark.parametrize(("name", "keys"), COMMITS, ids=str)
@pytest.mark.parametrize("codec", ["none", "top-k"])
def test_paradigms_that_commit_accept_their_options(name: str, keys: dict[str, Any], codec: str) -> None:
    found = make_job(paradigm={"name": name, **keys}, compression={"name": codec})
    assert create(name, 2, **found.paradigm_options).name == name


@pytest.mark.parametrize("commits", [1, 3, 6])
@pytest.mark.parametrize("check_period_s", [0.3, 0.7, 60])
def test_as_many_commits_as_a_job_may_have_its_machine_takes(check_period_s: float, commits: int) -> None:
    interval_s = check_period_s / commits
    found = job("adsp", check_period_s=check_period_s, interval_min_s=interval_s, commits=commits)
    assert create("adsp", 4, **found.paradigm_options).commits == commits


@pytest.mark.parametrize(
    ("name", "keys", "commits", "on_workers"),
    [
        ("bsp", {}, False, False),
        ("easgd", {}, False, True),
        ("ashl", {}, True, True),
        ("adsp", {}, True, True),
        ("allreduce", {}, False, True),
    ],
)
def test_where_steps_are_made_and_what_is_pushed(
    name: str, keys: dict[str, Any], commits: bool, on_workers: bool
) -> None:
    found = make_job(paradigm={"name": name, **keys})
    assert (found.commits, found.paradigm.steps_on_workers) == (commits, on_workers)


@pytest.mark.parametrize(
    ("name", "keys", "local_steps"), [("bsp", {}, 1), ("easgd", {"period": 3}, 3), ("local-sgd", {"steps": 4}, 1)]
)
def test_local_steps_are_those_between_pushes(name: str, keys: dict[str, Any], local_steps: int) -> None:
    assert job(name, **keys).local_steps == local_steps


def test_evaluations_that_a_paradigm_uses_are_made() -> None:
    for name in ("ashl", "adsp"):
        job(name, loss="evaluation")
        with pytest.raises(JobError, match='^paradigm.loss = "evaluation": workload.name = "timing" must be one that'):
            make_job(paradigm={"name": name, "loss": "evaluation"}, workload={"name": "timing"})
        make_job(paradigm={"name": name}, workload={"name": "timing"}, evaluation={"every_samples": 0})
    never = {"evaluation": {"every_samples": 0}}
    make_job(paradigm={"name": "adsp", "loss": "evaluation"}, **never)  # which asks for them itself
    message = '^evaluation.every_samples = 0: must be at least 1 with paradigm.loss = "evaluation"$'
    with pytest.raises(JobError, match=message):
        make_job(paradigm={"name": "ashl", "loss": "evaluation"}, **never)


@pytest.mark.parametrize("check_period_s", [0.3, 0.7, 1, 7, 60, 1e-3])
def test_six_commits_fit_into_a_period_unless_they_are_further_apart(check_period_s: float) -> None:
    assert job("adsp", check_period_s=check_period_s, commits=6).paradigm.commits == 6
    assert error("adsp", check_period_s=check_period_s, commits=7).startswith("paradigm.commits = 7: must be at most 6")


@pytest.mark.parametrize("name", ["ashl", "adsp"])
def test_optimizers_run_on_the_workers_and_batches_are_equal(name: str) -> None:
    assert refusal(make_job, paradigm={"name": name}, batches={"policy": "proportional"}) == (
        f'batches.policy = "proportional": must be "equal" with paradigm.name = "{name}": its workers push '
        "changes of their weights"
    )
    with pytest.raises(JobError, match=f'^optimizer.async_lr_scale = "1/workers": must be 1.0 .*"{name}"'):
        make_job(paradigm={"name": name}, optimizer={"name": "sgd", "lr": 0.1, "async_lr_scale": "1/workers"})
    with pytest.raises(JobError, match=f'^cluster.servers = 0: must be at least 1 with paradigm.name = "{name}"'):
        make_job(paradigm={"name": name}, cluster={"servers": 0})


K = 'must be a whole number of at least 1, or one of "state", "loss", "min", "throughput"'
STAYS_WHAT_IT_IS = "must be omitted beside paradigm.k = 3, which does not change"

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("k-sync", {}, f"paradigm.k: missing; {K}"),
    ("k-sync", {"k": 0}, f"paradigm.k = 0: {K}"),
    ("k-sync", {"k": 1.0}, f"paradigm.k = 1.0: {K}"),
    ("k-sync", {"k": True}, f"paradigm.k = true: {K}"),
    ("k-sync", {"k": "speed"}, f'paradigm.k = "speed": {K}'),
    ("k-sync", {"k": [1]}, f"paradigm.k = [1]: {K}"),
    ("k-sync", {"k": "speed", "k_min": 0}, f'paradigm.k = "speed": {K}'),
    ("k-sync", {"k": 5}, "paradigm.k = 5: must be at most cluster.workers = 4"),
    ("k-batch-sync", {"k": 5}, "paradigm.k = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": "min", "k_min": 5}, "paradigm.k_min = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": "min", "k_start": 5}, "paradigm.k_start = 5: must be at most cluster.workers = 4"),
    ("k-async", {"k": 3, "k_min": 1}, f"paradigm.k_min = 1: {STAYS_WHAT_IT_IS}"),
    ("k-async", {"k": 3, "k_start": 3}, f"paradigm.k_start = 3: {STAYS_WHAT_IT_IS}"),
    ("k-async", {"k": "state", "k_min": 0}, "paradigm.k_min = 0: must be at least 1"),
    ("k-async", {"k": "state", "k_start": 1.5}, "paradigm.k_start = 1.5: must be a whole number"),
    (
        "k-async",
        {"k": "state", "k_min": 3, "k_start": 2},
        "paradigm.k_start = 2: must be at least paradigm.k_min = 3",
    ),
    ("k-sync", {"k": 3, "cancel": "stop"}, "paradigm.cancel = \"stop\": must be 'drop' or 'abort'"),
    ("k-sync", {"k": 3, "micro_batches": 0}, "paradigm.micro_batches = 0: must be at least 1"),
    (
        "k-sync",
        {"k": 3, "staleness_max": 5},
        "paradigm.staleness_max = 5: unknown key; must be one of name, k, k_min, k_start, cancel, micro_batches",
    ),
    (
        "k-batch-async",
        {"k": 3, "cancel": "drop"},
        'paradigm.cancel = "drop": unknown key; must be one of name, k, k_min, k_start, staleness_max, '
        "staleness_weight",
    ),
    ("k-async", {"k": 3, "staleness_max": -1}, "paradigm.staleness_max = -1: must be at least 0"),
    ("k-async", {"k": 3, "staleness_max": math.nan}, "paradigm.staleness_max = NaN: must be at least 0"),
    ("k-async", {"k": 3, "staleness_max": "none"}, 'paradigm.staleness_max = "none": must be a number'),
    (
        "k-async",
        {"k": 3, "staleness_weight": "linear"},
        "paradigm.staleness_weight = \"linear\": must be 'none' or 'inverse'",
    ),
    ("ashl", {"steps_coarse": 0}, "paradigm.steps_coarse = 0: must be at least 1"),
    ("ashl", {"steps_fine": 17}, "paradigm.steps_fine = 17: must be at most paradigm.steps_coarse = 16"),
    ("ashl", {"staleness": math.inf}, "paradigm.staleness = inf: must be a whole number"),
    ("ashl", {"staleness": -1}, "paradigm.staleness = -1: must be at least 0"),
    ("ashl", {"ratio_coarse": 0}, "paradigm.ratio_coarse = 0: must be greater than 0"),
    ("ashl", {"ratio_fine": 1.1}, "paradigm.ratio_fine = 1.1: must be at most 1"),
    ("ashl", {"loss_preset": math.inf}, "paradigm.loss_preset = inf: must be a finite number"),
    ("ashl", {"plateau": 0}, "paradigm.plateau = 0: must be greater than 0"),
    ("ashl", {"plateau": 1}, "paradigm.plateau = 1: must be less than 1"),
    ("ashl", {"share": "all"}, "paradigm.share = \"all\": must be 'data' or 'equal'"),
    ("ashl", {"commit": "later"}, "paradigm.commit = \"later\": must be 'on-arrival' or 'after-gate'"),
    ("ashl", {"warmup": -1}, "paradigm.warmup = -1: must be at least 0"),
    ("ashl", {"profiled": 1}, "paradigm.profiled = 1: must be at least 2"),
    (
        "ashl",
        {"step_coarse": 3},
        "paradigm.step_coarse = 3: unknown key; must be one of name, steps_coarse, steps_fine, staleness, "
        "ratio_coarse, ratio_fine, loss_preset, plateau, loss, share, commit, warmup, profiled; did you mean "
        "steps_coarse?",
    ),
    ("adsp", {"check_period_s": 0}, "paradigm.check_period_s = 0: must be greater than 0"),
    ("adsp", {"interval_min_s": 0}, "paradigm.interval_min_s = 0: must be greater than 0"),
    ("adsp", {"interval_min_s": 61}, "paradigm.interval_min_s = 61: must be at most paradigm.check_period_s = 60"),
    ("adsp", {"rule": "paper"}, "paradigm.rule = \"paper\": must be 'cumulative' or 'released'"),
    ("adsp", {"commits": 0}, "paradigm.commits = 0: must be at least 1"),
    (
        "adsp",
        {"interval_min_s": 25, "commits": 3},
        "paradigm.commits = 3: must be at most 2: commits are paradigm.interval_min_s = 25 apart, in "
        "paradigm.check_period_s = 60",
    ),
    ("adsp", {"search_every_s": 0}, "paradigm.search_every_s = 0: must be greater than 0"),
    ("adsp", {"loss_rise": 0}, "paradigm.loss_rise = 0: must be greater than 0"),
    ("adsp", {"loss_target": math.nan}, "paradigm.loss_target = NaN: must be a finite number"),
    (
        "adsp",
        {"staleness": 3},
        "paradigm.staleness = 3: unknown key; must be one of name, check_period_s, interval_min_s, rule, commits, "
        "search_every_s, loss_rise, loss_target, loss",
    ),
    ("adsp", {"loss": "server"}, "paradigm.loss = \"server\": must be 'commits' or 'evaluation'"),
    (
        "adsp",
        {"loss": "evaluation", "commits": 2},
        'paradigm.loss = "evaluation": must be "commits" with paradigm.commits = 2, where nothing is searched for',
    ),
]


@pytest.mark.parametrize(("name", "keys", "message"), MISTAKES, ids=str)
def test_mistakes_are_reported_in_one_line(name: str, keys: dict[str, Any], message: str) -> None:
    assert error(name, **keys) == message
