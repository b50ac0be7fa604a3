"""The folder of a run: found, made, and never written over."""

from concurrent.futures import ThreadPoolExecutor

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
    assert list((tmp_path / "here").iterdir()) == []
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    assert outputs.choose(make_job(), tmp_path / "there") == tmp_path / "there"
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["notes"]
    assert outputs.choose(make_job(), tmp_path / "there") == tmp_path / "there"  # as the ranks do after the front


def test_otherwise_it_is_named_after_job_and_time(tmp_path):
    names = []
    for _ in range(3):
        folder = outputs.choose(make_job(), None)
        outputs.create(folder, make_job())
        names.append(str(folder))
    assert names == [f"runs/test-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: outputs.choose(make_job(), None), range(40)))
    assert len(set(folders)) == 40


@pytest.mark.parametrize("name", ["trace.h5", "job.toml", "weights.safetensors", "summary.json"])
def test_a_finished_or_unfinished_run_is_never_overwritten(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(b"mine")
    with pytest.raises(JobError, match=f"^out run: must not hold a {name} already: runs are never overwritten$"):
        outputs.choose(make_job(), "run")
    assert (tmp_path / "run" / name).read_bytes() == b"mine"


def test_of_two_runs_that_choose_the_same_folder_one_gets_it(tmp_path):
    folders = [outputs.choose(make_job(), "run") for _ in range(2)]
    outputs.create(folders[0], make_job())
    with pytest.raises(JobError, match=r"^out run: must not hold a job.toml already: runs are never overwritten$"):
        outputs.create(folders[1], make_job(seed=5))
    assert Job.from_toml((tmp_path / "run" / "job.toml").read_text()) == make_job()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(JobError, match=r"^out run: must be a folder$"):
        outputs.choose(make_job(), "run")
    with pytest.raises(JobError, match=r"^out run/below: Not a directory$"):
        outputs.choose(make_job(), "run/below")
    (tmp_path / "runs").write_text("")
    with pytest.raises(JobError, match=r"^out runs: File exists$"):
        outputs.choose(make_job(), None)


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", refuse)
    with pytest.raises(JobError, match=r"^out run: Permission denied$"):
        outputs.choose(make_job(), "run")


def test_the_resolved_job_lies_in_the_folder(tmp_path):
    outputs.create(outputs.choose(make_job(), tmp_path / "a" / "b"), make_job())
    assert Job.from_toml((tmp_path / "a" / "b" / "job.toml").read_text()) == make_job()
