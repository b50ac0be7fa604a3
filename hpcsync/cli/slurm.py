"""Command `hpcsync slurm`: a batch script for a job, as text. Nothing is submitted, and no Slurm is needed.

The script requests resources, and starts all ranks with one srun. Reasons for its details:

- Since Slurm 22.05 srun does not inherit --cpus-per-task from the job, so it is repeated.
- Each MPI library works with one value of srun's --mpi; with another it makes N worlds of one rank.
- Without --kill-on-bad-exit=1 the ranks would wait forever for a rank that was killed.
- After sbatch --export=NONE, the default of some clusters, srun gives the ranks none of the variables of the script,
  such as those of modules, without --export=ALL.
- Unless the cluster forbids it, Slurm queues any job again when a node fails. With --resume the second start continues
  the run, whose folder has the same name; without, it would be refused.
- Slurm sends SIGTERM to a preemptible job some time before its end. The ranks then write a checkpoint and end with
  status 75, and the script, which receives no signal, requeues the job: Slurm itself requeues only a job that is still
  running when its time is over. If a rank was killed, such as for want of memory, the status is none of hpcsync's own,
  0 to 2; what killed it may kill it again, so the script requeues the job only if it has been queued fewer times
  than a limit. Of an array it names its own task: the job id of the last task is also that of the array, all of
  whose tasks Slurm would end and queue again.
- With on_death = "restart" the script starts one `hpcsync run`, which starts the ranks with srun, again when one has
  died. With --no-kill the job goes on when a node fails. A job that was submitted from a step, such as an interactive
  shell, has variables of that step, by which `hpcsync run` would take itself for a rank of it.
- The ranks of a heterogeneous job are one world if one srun starts them; each kind of node has its own number of
  threads.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcsync.cli import grid
from hpcsync.config import job as jobs
from hpcsync.config.errors import JobError, printable
from hpcsync.config.job import Job
from hpcsync.system import launcher

MOST_RESTARTS = 10  # after which a job of which a rank was killed is not queued again
WARNING_S = 120  # SIGTERM is sent this long before the time limit of a preemptible job
EARLY_S = 60  # Slurm may send it so much earlier
OF_STEP = ("SLURM_STEP_ID", "PMIX_RANK", "PMI_SIZE")  # variables by which `launcher` recognises a rank of srun


class BatchRequest(NamedTuple):
    """Options of the command line, under their names.

    Each of the first six has either one value, for all nodes, or one value for each kind of node.
    """

    nodes: Sequence[int]
    ntasks_per_node: Sequence[int]
    cpus_per_task: Sequence[int] = (1,)
    gpus_per_node: Sequence[int] = ()
    partition: Sequence[str] = ()
    mem: Sequence[str] = ()
    time: str | None = None
    account: str | None = None
    array: Sequence[str] = ()
    preemptible: bool = False
    mpi: str | None = None


def _matching(pattern: str) -> Callable[[Any], bool]:
    return lambda value: re.fullmatch(pattern, value) is not None


NAME = _matching(r"[\w.,@+-]+"), "a name of letters, digits and _ . , @ + -"
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "nodes": (lambda n: n >= 1, "at least 1"),
    "ntasks_per_node": (lambda n: n >= 1, "at least 1"),
    "cpus_per_task": (lambda n: n >= 1, "at least 1"),
    "gpus_per_node": (lambda n: n >= 0, "at least 0"),
    "partition": NAME,
    "mem": (_matching(r"\d+[KMGT]?"), "a whole number of megabytes per node, or one with K, M, G or T, such as 16G"),
    "time": (
        _matching(r"(\d+|\d+-([01]?\d|2[0-3]))(:[0-5]\d){0,2}"),
        "minutes, hours:minutes:seconds or days-hours:minutes, with up to 59 minutes of an hour and 23 hours of a day",
    ),
    "account": NAME,
    "mpi": (_matching(r"\w+"), "pmix, pmi2 or another kind that srun --mpi=list names"),
}
OF_A_KIND = ("partition", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem")


def script(path: Path, overrides: Sequence[str], asked: BatchRequest, command: str) -> str:
    """Return the batch script of a job.

    Parameters
    ----------
    path : path
        Job file.
    overrides : sequence of str
        ``KEY=VALUE`` overrides of the job file.
    asked : BatchRequest
        Options of the command line.
    command : str
        Command line, written into the second line of the script.

    Raises
    ------
    JobError
        If the job or an option is not allowed.
    """
    for text in (str(path), *overrides, *asked.array, command):
        if printable(text) != text:
            raise JobError(f"slurm: {text}: must not have control characters, such as line ends, in a batch script")
    kinds = _kinds(asked)
    ranks = sum(kind["nodes"] * kind["ntasks_per_node"] for kind in kinds)
    tasks = grid.combinations("--array", asked.array)
    if tasks and len(kinds) > 1:
        raise JobError(
            f"--array {asked.array[0]}: must be left out with {len(kinds)} kinds of node: Slurm has no arrays of "
            "heterogeneous jobs"
        )
    loaded = [jobs.load(path, [*overrides, *task], ranks) for task in tasks or [()]]
    grid.refuse_same("--array", map(" ".join, tasks or [()]), loaded)
    for job in loaded:
        jobs.refuse_simulated(job)
    restarts = _restart(loaded, len(kinds))
    if asked.preemptible and asked.time is not None and 0 < _seconds(asked.time) <= WARNING_S + EARLY_S:
        raise JobError(
            f"--time {asked.time}: must be more than {(WARNING_S + EARLY_S) // 60} minutes with --preemptible, which "
            "may end and requeue the job that long before its time limit"
        )
    lines = [
        "#!/bin/bash",
        f"# {command}",
        *_directives({"job_name": loaded[0].name, "output": "%x-%j.out", "open_mode": "append"}),
        *_directives({"time": asked.time, "account": asked.account}),
    ]
    if tasks:
        lines += _directives({"array": f"0-{len(tasks) - 1}"})
    if asked.preemptible:
        lines += ["#SBATCH --requeue", *_directives({"signal": f"TERM@{WARNING_S}"})]
    lines += ["#SBATCH --no-kill"] if restarts else []
    for i, kind in enumerate(kinds):
        lines += ["#SBATCH hetjob"] if i else []
        lines += _directives(kind)
    program = _program(path, overrides, asked, len(kinds), settings=bool(tasks), restarts=restarts)
    return "\n".join([*lines, "", *_settings(tasks), *program]) + "\n"


def _restart(loaded: Sequence[Job], n_kinds: int) -> bool:
    """Return whether `hpcsync run` is to start the ranks. Raise JobError if the jobs differ, or it cannot."""
    asked = {job.cluster.on_death == "restart" for job in loaded}
    if len(asked) > 1:
        raise JobError('cluster.on_death: must be "restart" in all tasks of an array, or in none')
    if True in asked and n_kinds > 1:
        raise JobError(f'cluster.on_death = "restart": must be "end" with {n_kinds} kinds of node')
    return True in asked


def _kinds(asked: BatchRequest) -> list[dict[str, Any]]:
    """Return the options of every kind of node. Raise JobError for a value that is not allowed."""
    for name, (allowed, must_be) in ALLOWED.items():
        given = getattr(asked, name)
        for value in [given] if isinstance(given, str | None) else given:
            if value is not None and not allowed(value):
                raise JobError(f"--{_dashed(name)} {value}: must be {must_be}")
    each = {name: list(getattr(asked, name)) or [None] for name in OF_A_KIND}
    n = max(map(len, each.values()))
    for name, values in each.items():
        if len(values) not in (1, n):
            raise JobError(
                f"--{_dashed(name)}: given {len(values)} times; must be given once, or once per kind of node, {n} times"
            )
    return [{name: values[i % len(values)] for name, values in each.items()} for i in range(n)]


def _seconds(time: str) -> int:
    """Return a time limit in seconds; 0 for none."""
    days, _, clock = time.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    units = (3600, 60, 1) if days or len(fields) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(fields, units, strict=False))


def _directives(options: dict[str, Any]) -> list[str]:
    return [f"#SBATCH --{_dashed(name)}={value}" for name, value in options.items() if value is not None]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


# ---- job arrays ----


def _settings(tasks: Sequence[tuple[str, ...]]) -> list[str]:
    if not tasks:
        return []
    cases = [
        f"    {i}) settings=({' '.join(f'--set {shlex.quote(s)}' for s in task)}) ;;" for i, task in enumerate(tasks)
    ]
    return ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]


# ---- ranks ----


def mpi_of_this_python() -> str:
    """Return the value of srun's --mpi for the MPI library of this Python. Raise JobError if it is unknown."""
    kind = next((kind for library, kind in launcher.SRUN_MPI.items() if library in launcher.mpi_library()), None)
    if kind is None:
        raise JobError(f"--mpi: missing; must be {ALLOWED['mpi'][1]}: this Python has neither Open MPI nor MPICH")
    return kind


def _program(
    path: Path, overrides: Sequence[str], asked: BatchRequest, n_kinds: int, *, settings: bool, restarts: bool
) -> list[str]:
    srun = f"srun --mpi={asked.mpi or mpi_of_this_python()} --kill-on-bad-exit=1"
    srun += " --export=ALL" if n_kinds == 1 else ""  # several kinds have different variables
    groups = [f"_HET_GROUP_{i}" for i in range(n_kinds)] if n_kinds > 1 else [""]
    ranks = f"$(({' + '.join(f'SLURM_NTASKS{group}' for group in groups)}))" if n_kinds > 1 else '"$SLURM_NTASKS"'
    what = " ".join([shlex.quote(str(path)), *(f"--set {shlex.quote(s)}" for s in overrides)])
    what += ' "${settings[@]}"' if settings else ""
    folder = "$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID" if settings else "$SLURM_JOB_ID"
    how = f'-n {ranks} --out "runs/$SLURM_JOB_NAME-{folder}" --resume'
    rank = f"python -m mpi4py -m hpcsync run {what}"
    if restarts:
        threads = "$SLURM_CPUS_PER_TASK"
        lines = [f"unset {' '.join(OF_STEP)}", f'export OMP_NUM_THREADS="{threads}"']
        lines.append(f'export MPIEXEC="{srun} --cpus-per-task={threads}"')
        lines.append(f"python -m hpcsync run {what} {how}")
    elif n_kinds == 1:
        threads = '"$SLURM_CPUS_PER_TASK"'
        lines = [f"export OMP_NUM_THREADS={threads}", f"{srun} --cpus-per-task={threads} \\"]
        lines += [f"    {rank} \\", f"    {how}"]
    else:
        lines = [f"run=({rank} {how})", f"{srun} \\"]
        for i, group in enumerate(groups):
            threads = f"$SLURM_CPUS_PER_TASK{group}"
            options = f'--het-group={i} --cpus-per-task="{threads}" --export="ALL,OMP_NUM_THREADS={threads}"'
            lines.append(f'    {options} "${{run[@]}}"' + (" : \\" if i < n_kinds - 1 else ""))
    if asked.preemptible:
        killed = f'[ $status -gt 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_RESTARTS} ]'
        again = f"if [ $status -eq 75 ] || {{ {killed}; }}; then"
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if settings else "$SLURM_JOB_ID"
        lines += ["status=$?", again, f'    scontrol requeue "{job}"', "fi", "exit $status"]
    return lines
