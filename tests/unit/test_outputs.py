"""The folder of a run: found, made, and never written over."""

import pytest

from hpcsync import outputs
from hpcsync.job import Job
from hpcsync.job_errors import JobError
from tests.unit.jobs import make_job


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outputs.time, "strftime", lambda _: "20260102-030405")


def test_a_folder_of_the_users_is_taken_as_it_is(tmp_path):
    assert outputs.choose(make_job(), "here") == tmp_path.joinpath("here").relative_to(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    assert outputs.choose(make_job(), tmp_path / "there") == tmp_path / "there"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]  # nothing is made


def test_otherwise_it_is_named_after_job_and_time(tmp_path):
    names = []
    for _ in range(3):
        folder = outputs.choose(make_job(), None)
        outputs.create(folder, make_job())
        names.append(str(folder))
    assert names == [f"runs/test-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_a_finished_or_unfinished_run_is_never_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace.h5").write_bytes(b"")
    with pytest.raises(JobError, match=r"^--out run: must not hold a trace\.h5 already: runs are never overwritten$"):
        outputs.choose(make_job(), "run")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(JobError, match=r"^--out run: must be a folder$"):
        outputs.choose(make_job(), "run")
    with pytest.raises(JobError, match=r"^--out run/below: "):
        outputs.create(outputs.choose(make_job(), "run/below"), make_job())


def test_the_resolved_job_lies_in_the_folder(tmp_path):
    outputs.create(tmp_path / "a" / "b", make_job())
    assert Job.from_toml((tmp_path / "a" / "b" / "job.toml").read_text()) == make_job()
