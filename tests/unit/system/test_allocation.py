"""What is left of an allocation: ranks, and the variables that a launcher reads. Slurm itself: tests/slurm."""

import pytest

from hpcsync.system import allocation
from hpcsync.system.allocation import Left, left

FOUR = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}


@pytest.fixture(autouse=True)
def time_flies(monkeypatch):
    monkeypatch.setattr(allocation.time, "sleep", lambda s: None)


@pytest.mark.parametrize(
    "environ", [{}, *({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": number} for number in ("1", ""))]
)
def test_without_several_nodes_all_ranks_are_left(environ):
    assert left(8, environ) == Left(8, {})


def test_all_nodes_answer():
    assert left(8, FOUR, lambda job: ["a", "b", "c", "d"], set) == Left(8, {})


@pytest.mark.parametrize(
    ("n", "n_left", "per_node"), [(8, 6, 2), (4, 3, 1), (7, 3, 1), (5, 3, 1), (13, 9, 3), (3, 3, 1)]
)
def test_a_node_that_was_removed(n, n_left, per_node):
    found = left(n, FOUR, lambda job: ["a", "b", "d"], set)
    assert found.n_ranks == n_left
    assert found.variables["SLURM_JOB_NUM_NODES"] == found.variables["SLURM_NNODES"] == "3"
    assert found.variables["SLURM_NODELIST"] == "a,b,d"
    assert found.variables["SLURM_NTASKS"] == str(n_left)
    assert found.variables["SLURM_TASKS_PER_NODE"] == f"{per_node}(x3)"


@pytest.mark.parametrize(
    ("environ", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3")]
)
def test_of_an_array_it_asks_for_the_task(environ, job):
    """Of the last task SLURM_JOB_ID is the number of the array, which names all tasks."""
    asked = []
    left(8, FOUR | environ, lambda job: asked.append(job) or ["a", "b", "c"], set)
    assert asked == [job]


def test_it_waits_until_a_node_that_does_not_answer_is_removed(capsys):
    said = iter([["a", "b", "c", "d"]] * 3 + [["a", "b", "d"]] * 2)
    found = left(8, FOUR, lambda job: next(said), lambda nodes: set(nodes) - {"c"})
    assert found.n_ranks == 6
    assert len(list(said)) == 1
    assert capsys.readouterr().err == "hpcsync: no answer from c: waiting until Slurm has removed it\n"


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(allocation, "REMOVED_WITHIN_S", 0.1)
    assert left(8, FOUR, lambda job: ["a", "b", "c", "d"], lambda nodes: {"a"}) == Left(8, {})


def test_without_slurms_commands_all_ranks_are_left(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert left(8, FOUR) == Left(8, {})
