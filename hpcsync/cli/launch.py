"""Command `hpcsync launch`: any program on MPI ranks of this node."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from hpcsync.system import launcher
from hpcsync.system.signals import TO_BE_RESUMED


def launch(n: int, program: Sequence[str], timeout_s: float | None = None, *, oversubscribe: bool = False) -> int:
    """Run a program on `n` ranks until it ends; return the exit status.

    Parameters
    ----------
    n : int
        Number of ranks.
    program : sequence of str
        Program and its arguments; `python` stands for the Python that runs hpcsync.
    timeout_s : float, optional
        Seconds after which the ranks are ended, with status 124.
    oversubscribe : bool
        If True, allow more ranks than a small multiple of the cores.

    Raises
    ------
    LaunchError
        If the ranks cannot be started.
    """
    if n < 1:
        raise launcher.LaunchError(f"-n {n}: must be at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise launcher.LaunchError(f"--timeout {timeout_s:g}: must be a number of seconds greater than 0")
    if not oversubscribe:
        launcher.refuse_crowd(n, f"-n {n}", launcher.environment())
    found = program[0] == "python" or shutil.which(program[0]) or shutil.which(f"./{program[0]}")
    if not found and launcher.on_this_node(launcher.environment()):
        hint = f"; start a script with hpcsync launch -n {n} -- python {program[0]}" * program[0].endswith(".py")
        raise launcher.LaunchError(f"{program[0]}: must be a program that can be started{hint}")
    ended = launcher.launch(n, program, timeout_s=timeout_s)
    if ended.timed_out:
        print(f"hpcsync: the ranks still ran after {timeout_s:g} s (--timeout) and were ended", file=sys.stderr)
    elif ended.signum is not None and not ended.runs:
        print("hpcsync: interrupted", file=sys.stderr)
    if ended.runs and ended.status not in (0, TO_BE_RESUMED):  # with the latter rank 0 has said how to resume
        from hpcsync.run_dir import unfinished

        is_stopped = ended.timed_out or ended.signum is not None
        unfinished.close_scripts(ended.runs, "interrupted" if is_stopped else "failed")
    return ended.resumable_status if ended.status == TO_BE_RESUMED else ended.status
