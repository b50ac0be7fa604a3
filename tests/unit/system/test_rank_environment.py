"""A process knows from its environment whether it is a rank, and which one."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hpcsync.system import rank_environment

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
MPICH = {"PMI_SIZE": "3", "PMI_RANK": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}
SHELL = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}
PMI2_SHELL = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1", "PMI_RANK": "0", "PMI_JOBID": "7.0"}
INTERACTIVE = {**STEP, "SLURM_STEP_ID": "4294967290"}
SCRIPT = {**STEP, "SLURM_STEP_ID": "4294967291"}
SIGNED_SCRIPT = {**STEP, "SLURM_STEP_ID": "-5"}  # of Slurm 26.05


@pytest.mark.parametrize(
    ("environ", "size", "under"),
    [
        ({}, None, False),
        (OPEN_MPI, 3, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, 1, True),
        (MPICH, 3, True),
        (BATCH, None, False),
        (STEP, 3, True),
        (SHELL, 1, False),
        (PMI2_SHELL, 1, False),
        ({**PMI2_SHELL, "PMI_SIZE": "3", "SLURM_STEP_NUM_TASKS": "3", "PMI_RANK": "1"}, 3, True),
        (INTERACTIVE, None, False),
        (SCRIPT, None, False),
        (SIGNED_SCRIPT, None, False),
        ({**SIGNED_SCRIPT, "PMIX_RANK": "0"}, None, False),  # of the shell in which the job was submitted
        ({**STEP, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5"}, 5, True),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x@1"}, None, True),
        ({"PMIX_RANK": "", "PMIX_NAMESPACE": "x@1"}, None, False),
        (dict.fromkeys({**OPEN_MPI, **MPICH, **STEP}, ""), None, False),
        ({**STEP, **dict.fromkeys({**OPEN_MPI, **MPICH}, "")}, 3, True),
    ],
)
def test_expected_size_and_under_launcher(environ: dict[str, str], size: int | None, under: bool) -> None:
    assert rank_environment.expected_size(environ) == size
    assert rank_environment.under_launcher(environ) is under
    if under:
        assert rank_environment.expected_rank(environ) == 1


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_a_rank_that_the_shell_has_kept_of_another_launch_is_none(name: str) -> None:
    assert not rank_environment.under_launcher({name: "1"})
    assert rank_environment.expected_rank({name: "1"}) == 0


@pytest.mark.parametrize(("rank", "terminal", "speaks"), [("0", False, True), ("1", False, False), ("1", True, True)])
def test_rank_0_speaks_for_all_and_who_has_a_terminal(
    rank: str, terminal: bool, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    assert rank_environment.speaks_for_all() is speaks
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": rank}.items():  # its processes share a terminal
        monkeypatch.setenv(name, value)
    assert rank_environment.speaks_for_all() is (rank == "0")


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": "2"}, 2),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({"PALS_LOCAL_RANKID": "4"}, 4),
        ({"FLUX_TASK_LOCAL_ID": "5"}, 5),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "6"}, 6),
        ({"SLURM_LOCALID": "0", "MPI_LOCALRANKID": "2"}, 2),
        ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
    ],
)
def test_local_rank(environ: dict[str, str], rank: int) -> None:
    assert rank_environment.local_rank(environ) == rank


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        (STEP, "7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2"),
        ({"PBS_JOBID": "7[2].head"}, "7[2].head"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "7"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}, "7[2]"),
        ({"SLURM_JOB_ID": "", "SLURM_ARRAY_TASK_ID": "", "LSB_JOBID": "7", "LSB_JOBINDEX": ""}, "7"),
        ({"SLURM_ARRAY_TASK_ID": "2", "LSB_JOBINDEX": "2"}, ""),
    ],
)
def test_batch_job(environ: dict[str, str], name: str) -> None:
    assert rank_environment.batch_job(environ) == name


def test_pmi2_of_srun_is_recognised() -> None:
    assert rank_environment.under_pmi2_of_slurm({**STEP, "SLURM_STEP_ID": "0", "PMI_JOBID": "7.0"})
    hydra = {**PMI2_SHELL, "MPI_LOCALRANKID": "0"}
    assert rank_environment.under_launcher(hydra)
    for environ in (STEP, OPEN_MPI, MPICH, {**MPICH, **STEP}, {}, hydra):
        assert not rank_environment.under_pmi2_of_slurm(environ)
