"""What a rank knows of its launch: environment variables of launchers and of batch systems."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from hpcsync.system.signals import LISTENING

VIEWED = "HPCSYNC_VIEWED"  # environment variable of ranks whose status is shown by the process that started them
TERMINAL = "HPCSYNC_TERMINAL"  # environment variable of the ranks: columns of the terminal that shows their output

# Open MPI's mpirun keeps files in a folder named after its process id, below this one. It cannot start if the folder
# exists, left by a killed mpirun with the same id. So each launch has a base folder of its own, unless the user has set
# one of the two variables; mpirun refuses both together.
SESSION_FOLDER, SESSION_FOLDERS = "PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"

# Prefixes of the variables that a launcher or a batch system sets for its ranks. With them, an mpiexec started by a
# rank would believe to be a part of that job, or look for hosts there.
OF_RANKS = (
    # Open MPI with PMIx and PRRTE; of its MCA variables those that it sets itself: version 5, then 4.
    *("OMPI_", "PMIX_", "PRTE_", "OPAL_USER_PARAMS_GIVEN"),
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint"),
    # MPICH's hydra and launchers derived from it.
    *("PMI_", "HYDI_", "MPI_LOCAL", "GFORTRAN_UNBUFFERED_PRECONNECTED", "MPISPAWN_", "MV2_COMM_WORLD_"),
    # Batch systems.
    *("SLURM", "SRUN_", "PBS_", "LSB_", "PE_HOSTFILE", "PALS_", "FLUX_"),
    # Hosts that the user named.
    *("HYDRA_HOST_FILE", "PRTE_MCA_prte_default_hostfile"),
    # Variables of this launch.
    *(SESSION_FOLDER, LISTENING, VIEWED, TERMINAL),
)


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a number: one may be set but empty. None without one."""
    return next((int(environ[name]) for name in names if re.fullmatch("-?[0-9]+", environ.get(name, ""))), None)


def expected_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher of this process has started; None without a launcher."""
    if (size := number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")) is not None:
        return size
    return (number(environ, "SLURM_STEP_NUM_TASKS") or 1) if in_step(environ) else None


def in_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun has started this process, or the shell above it.

    A batch script and the interactive shell of salloc are steps too, with the largest 32-bit numbers, which Slurm 26.05
    writes with a sign.
    """
    step = number(environ, "SLURM_STEP_ID")
    return step is not None and 0 <= step < 2**32 - 16


def expected_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank by its launcher's environment; 0 without a launcher."""
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, which another launcher may have started once a node
        return number(environ, "RANK") or 0
    if not under_launcher(environ):  # a shell may have kept the variable of another launch
        return 0
    return number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID") or 0


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank within its node by its launcher's environment; 0 without a launcher."""
    names = (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",  # MPICH's hydra and Intel's
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
        "FLUX_TASK_LOCAL_ID",
        "SLURM_LOCALID",  # last: a batch script has it too, and the launchers that it starts inherit it
    )
    return number(environ, *names) or 0


def all_on_node(environ: Mapping[str, str]) -> bool:
    """Return True if the launcher of MPICH or Open MPI says that all ranks are on this process's node."""
    names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return str(expected_size(environ)) in [environ.get(name) for name in names]


def speaks_for_all() -> bool:
    """Return True if this process prints errors that all ranks have in common.

    Rank 0 does, and a process with a terminal of its own: no MPI launcher has started it, though its shell may have
    kept the variables of one. Processes of torchrun share its terminal.
    """
    return expected_rank() == 0 or (sys.stderr.isatty() and "TORCHELASTIC_RUN_ID" not in os.environ)


def is_viewed() -> bool:
    """Return True if the process that has started this rank shows the status of the run."""
    return VIEWED in os.environ


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process is a rank of a job. A shell in a Slurm step of one task is not."""
    size = expected_size(environ)
    if size is None:
        has_rank = number(environ, "PMIX_RANK") is not None and bool(environ.get("PMIX_NAMESPACE"))
        return has_rank and not environ.get("SLURM_STEP_ID")  # else of the shell that submitted the job
    if size > 1 or number(environ, "OMPI_COMM_WORLD_SIZE") is not None:
        return True
    return number(environ, "PMI_SIZE") is not None and not under_pmi2_of_slurm(environ)


def under_pmi2_of_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun --mpi=pmi2 has started this process, and no launcher of MPICH that srun has started."""
    if "MPI_LOCALRANKID" in environ:
        return False
    return environ.get("PMI_JOBID") == f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"


def batch_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return the id of the batch job of this process, as the batch system's commands take it; "" outside of a job."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    if environ.get("LSB_JOBID") and number(environ, "LSB_JOBINDEX"):
        return f"{environ['LSB_JOBID']}[{environ['LSB_JOBINDEX']}]"
    names = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")  # PBS: 12[3] in an array
    return next((environ[name] for name in names if environ.get(name)), "")
