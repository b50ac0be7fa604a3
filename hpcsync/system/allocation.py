"""What is left of a Slurm allocation after nodes have failed.

With ``--no-kill`` a job goes on without a node that fails. Slurm ends the step that used the node and, after its
``SlurmdTimeout``, removes the node from the job. Until then a new step would be sent to the node and fail. The old step
may stay listed and hold the CPUs of the other nodes, and the variables of the batch script still describe the
allocation as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hpcsync.system import rank_environment

QUERY_S = 60.0
PROBE = "srun --immediate=10 --overlap --mpi=none --nodes=1 --ntasks=1 --nodelist"
POLL_S = 2.0
REMOVED_WITHIN_S = 900.0  # Slurm's SlurmdTimeout is 300 s unless it is set


class Left(NamedTuple):
    """Ranks for which there is room, and the variables that describe the allocation to a launcher.

    Attributes
    ----------
    n_ranks
        Number of ranks.
    variables
        Changes of the environment.
    """

    n_ranks: int
    variables: dict[str, str]


def left(
    n_ranks: int,
    environ: Mapping[str, str] = os.environ,
    nodes_of: Callable[[str], list[str]] | None = None,
    answering: Callable[[Sequence[str]], set[str]] | None = None,
) -> Left:
    """Return for how many of `n_ranks` ranks there is room: for all of them unless nodes of a Slurm job have failed.

    If a node does not answer, wait until Slurm has removed it. The others take as many ranks each as before, rounded
    down where the nodes had unequal numbers.

    Parameters
    ----------
    n_ranks : int
        Number of ranks for which there was room.
    environ : mapping, optional
        Environment; by default that of this process.
    nodes_of, answering : callable, optional
        Return the nodes that a job has now, and those of them that answer; by default as Slurm's commands say.
    """
    n_before = rank_environment.number(environ, "SLURM_JOB_NUM_NODES") or 1
    job = rank_environment.batch_job(environ)  # of an array the task: SLURM_JOB_ID may name all of them
    if not job or n_before == 1:
        return Left(n_ranks, {})
    nodes = _settled(job, nodes_of or _nodes_of, answering or _answering)
    if not 0 < len(nodes) < n_before:
        return Left(n_ranks, {})
    per_node, n_nodes = max(1, n_ranks // n_before), str(len(nodes))
    n_left = min(n_ranks, per_node * len(nodes))
    return Left(
        n_left,
        {
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), n_nodes),
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(nodes)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(n_left)),
            "SLURM_TASKS_PER_NODE": f"{per_node}(x{n_nodes})",
            "SLURM_OVERLAP": "1",  # a step that lost a node may hold the CPUs of the others until the job ends
        },
    )


def _settled(
    job: str, nodes_of: Callable[[str], list[str]], answering: Callable[[Sequence[str]], set[str]]
) -> list[str]:
    """Return the nodes of a job once all of them answer; or, if Slurm does not remove one for long, all it names."""
    nodes = nodes_of(job)
    if silent := sorted(set(nodes) - answering(nodes)):
        print(f"hpcsync: no answer from {', '.join(silent)}: waiting until Slurm has removed it", file=sys.stderr)
    deadline_s = time.monotonic() + REMOVED_WITHIN_S
    while set(silent) & set(nodes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        nodes = nodes_of(job)
    return nodes


def _nodes_of(job: str) -> list[str]:
    names = _said("squeue", "--noheader", "--job", job, "--format", "%N").strip()
    return _said("scontrol", "show", "hostnames", names).split() if names else []


def _said(*line: str) -> str:
    """Return the output of one of Slurm's commands; "" if it fails."""
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=QUERY_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _answering(nodes: Sequence[str]) -> set[str]:
    """Return on which of these nodes a step can start; srun's exit status is 0 where it cannot, too."""
    steps = {}
    for node in nodes:
        line = [*PROBE.split(), node, "echo", "here"]
        steps[node] = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    answered, deadline_s = set(), time.monotonic() + QUERY_S
    for node, step in steps.items():
        try:
            output, _ = step.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            step.kill()
            output, _ = step.communicate()
        if output.split() == ["here"]:
            answered.add(node)
    return answered
