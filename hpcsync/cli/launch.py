"""Any program on MPI ranks of this node."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpcsync.system import launcher


def launch(n: int, program: Sequence[str], timeout_s: float | None = None, *, oversubscribe: bool = False) -> int:
    """Run n ranks of this program to their end; the exit status.

    Parameters
    ----------
    n : int
        The number of ranks.
    program : sequence of str
        The program and its arguments; `python` is the Python that runs this.
    timeout_s : float, optional
        After so many seconds the ranks are ended, with status 124.
    oversubscribe : bool
        Whether more ranks may start than a small multiple of the cores.

    Raises
    ------
    LaunchError
        Where the ranks cannot be started.
    """
    if n < 1:
        raise launcher.LaunchError(f"-n {n}: must be at least 1")
    if not oversubscribe:
        launcher.refuse_crowd(n, f"-n {n}", launcher.environment())
    ended = launcher.launch(n, program, timeout_s=timeout_s)
    if ended.timed_out:
        print(f"hpcsync: still running after {timeout_s:g} s: ended", file=sys.stderr)
    return ended.status
