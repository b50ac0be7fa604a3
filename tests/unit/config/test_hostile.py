"""Job files that try to exhaust the reader: each is refused in one line, at once."""

from pathlib import Path

import pytest

from hpcsync.config.errors import JobError
from hpcsync.config.job import MOST_CHARACTERS, Job, load
from tests import hostile_jobs

JOB = """
name = "small"
seed = 1
workload = {name = "timing", batch_size = 8, parameters = 100}
optimizer = {name = "sgd", lr = 0.1}
stop = {updates = 10}
paradigm = {name = "bsp"}
cluster = {workers = 3}
"""


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load(path, overrides)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{JOB}x = {'[' * 5000}{']' * 5000}", "at most 16 levels deep"),
        (f"{JOB}x = {'{a=' * 3000}1{'}' * 3000}", "at most 16 levels deep"),
        (f"{JOB}{'.'.join('a' * 5000)} = 1", "at most 16 levels deep"),
        (f"{JOB}{'.'.join('a' * 900)} = 1", "a.a...: must be nested at most 16 levels deep"),
        (JOB.replace("seed = 1", f"seed = {'9' * 5000}"), "at most 64 bits"),
        (JOB.replace("seed = 1", f"seed = {'9' * 400}"), "seed = 9999"),
        (JOB.replace("lr = 0.1", f"lr = 1{'0' * 400}"), "optimizer.lr = 1000"),
        (
            JOB.replace("workers = 3", f"workers = {2**63 - 1}"),
            "cluster.workers = 9223372036854775807: must be at most",
        ),
        (
            JOB.replace("workers = 3", "workers = 3, servers = 2000000"),
            "cluster.servers = 2000000: must be at most 1000000",
        ),
        (JOB.replace("parameters = 100", f"parameters = {2**62}"), "workload.parameters"),
        (JOB.replace("batch_size = 8", f"batch_size = {2**31}"), "workload.batch_size = 2147483648: must be at most"),
        (f"{JOB}# {'x' * MOST_CHARACTERS}", "at most 1,000,000 characters"),
        (f'{JOB}"\\u001b[31mred" = 1', "\\x1b[31mred = 1: unknown key"),
        (f"{JOB}{'k' * 5000} = 1", "kkk... = 1: unknown key"),
        (
            JOB.replace('{name = "bsp"}', '{name = "sync-switch", share = 0.1, then = {nam = "asp"}}'),
            "paradigm.then.name: missing; must be one of asp, ssp, dssp",
        ),
        (
            JOB.replace("workers = 3", 'workers = 3, times_from = "a\\u0000"'),
            'cluster.times_from = "a\\u0000": must not have the character U+0000',
        ),
        (JOB.replace("workers = 3", 'workers = 3, compute = {model = "table", table = "\\u0000"}'), "U+0000"),
        (JOB.replace("workers = 3", f'workers = 3, times_from = "{"x" * 300}"'), "a run's folder; File name too long"),
    ],
    ids=range(18),
)
def test_a_hostile_file(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{'.'.join('a' * 5000)}=1", "at most 16 levels deep"),
        (f"seed={'9' * 5000}", "at most 64 bits"),
        (f"stop.updates={'9' * 30}", "stop.updates = 9999"),
        (f"stop.updates={'[' * 5000}", "stop.updates"),
        (f"stop.{'9' * 3000}=1", "stop.99999"),
    ],
    ids=range(5),
)
def test_a_hostile_override(tmp_path: Path, override: str, says: str) -> None:
    assert says in refused(tmp_path, JOB, override)


def test_a_hostile_job_of_a_trace() -> None:
    with pytest.raises(JobError, match=r"^job: a\.a\.\.\.: must be nested at most 16 levels deep$"):
        Job.from_toml(f"{JOB}{'.'.join('a' * 900)} = 1")


def test_mutated_files_are_shown_or_refused_in_one_line() -> None:
    counts = hostile_jobs.ends(trials=300, seed=5)
    assert set(counts) == hostile_jobs.WELL
    assert min(counts.values()) > 30


def test_other_ends_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)

    def ends(what: BaseException) -> str:
        def fails(*_: object) -> None:
            raise what

        monkeypatch.setattr(hostile_jobs, "rows", fails)
        return hostile_jobs.outcome(path, ())

    assert ends(JobError("seed = x: must be a number")) == "refused"
    assert ends(JobError("x " * 3000)).startswith("MESSAGE: 'x x")
    assert ends(KeyError("seed")).startswith("KEYERROR in test_hostile.py:")
