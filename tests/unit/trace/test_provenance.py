"""Provenance of a trace."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import hpcsync
from hpcsync.config.job import Job
from hpcsync.trace.provenance import git_commit, provenance
from tests.unit.jobs import make_job

COMMIT, OTHER = "1" * 40, "2" * 40


@pytest.fixture
def repository(tmp_path):
    """A folder inside a repository whose branch `work` is at COMMIT."""
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/work\n")
    (tmp_path / ".git" / "refs" / "heads" / "work").write_text(f"{COMMIT}\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    return tmp_path


def pack(repository) -> None:
    (repository / ".git" / "refs" / "heads" / "work").unlink()
    (repository / ".git" / "packed-refs").write_text(
        f"# pack-refs with: peeled fully-peeled sorted\n{OTHER} refs/heads/a/refs/heads/work\n"
        f"{COMMIT} refs/heads/work\n^{OTHER}\n"
    )


def detach(repository) -> None:
    (repository / ".git" / "HEAD").write_text(f"{COMMIT}\n")


@pytest.mark.parametrize("changed", [lambda repository: None, pack, detach], ids=["branch", "packed", "detached"])
def test_the_commit_is_found_from_any_folder_inside(repository, changed):
    changed(repository)
    assert git_commit(repository) == git_commit(repository / "a" / "b") == COMMIT


def test_a_branch_without_a_commit_has_none(repository):
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/unborn\n")
    assert git_commit(repository) == ""


def test_a_linked_worktree_has_a_commit_of_its_own(repository):
    linked = repository / ".git" / "worktrees" / "b"
    linked.mkdir(parents=True)
    (linked / "HEAD").write_text("ref: refs/heads/other\n")
    (linked / "commondir").write_text("../..\n")
    (repository / ".git" / "refs" / "heads" / "other").write_text(f"{OTHER}\n")
    (repository / "a" / "b" / ".git").write_text(f"gitdir: {linked}\n")
    assert git_commit(repository / "a" / "b") == OTHER
    assert git_commit(repository / "a") == COMMIT


def test_outside_a_repository_there_is_no_commit(tmp_path):
    assert git_commit(tmp_path) == ""


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"ref: refs/heads/\0\n", b"ref: refs/heads\n", b"ours\n", b""])
def test_a_repository_that_cannot_be_read_has_no_commit(repository, content):
    (repository / ".git" / "HEAD").write_bytes(content)
    assert git_commit(repository) == ""


def test_a_branch_that_is_not_a_hash_is_no_commit(repository):
    (repository / ".git" / "refs" / "heads" / "work").write_text("not a hash\n")
    assert git_commit(repository) == ""


def test_files_that_may_not_be_read_are_no_commit(repository, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert git_commit(repository) == ""


def test_the_attributes_describe_the_run(repository, monkeypatch):
    monkeypatch.chdir(repository)
    job = make_job(cluster={"servers": 2, "workers": 3}, seed=5)
    found = provenance(job, engine="mpi", mpi_library="An MPI 1.0", hosts=["n1", "n2", "n1"])
    assert Job.from_toml(found["job"]) == job
    assert abs(datetime.fromisoformat(found["created"]) - datetime.now(UTC)) < timedelta(minutes=1)
    expected = {
        "engine": "mpi",
        "paradigm": "bsp",
        "n_servers": 2,
        "n_workers": 3,
        "seed": 5,
        "hpcsync_version": hpcsync.__version__,
        "git_commit": COMMIT,
        "mpi_library": "An MPI 1.0",
        "hosts": "n1,n2",
    }
    assert {key: found[key] for key in expected} == expected
    assert all(found[f"{package}_version"] for package in ("python", "numpy", "torch", "h5py"))
