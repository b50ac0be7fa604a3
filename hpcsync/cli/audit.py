"""Command `hpcsync audit`: the checks of a trace, and those of a recomputation."""

from __future__ import annotations

from pathlib import Path

from hpcsync.audit import trace_audit
from hpcsync.config.errors import JobError


def main(path: Path, *, recompute: bool) -> int:
    """Audit a trace and print the result; return the exit status. Raises JobError if it cannot be recomputed."""
    if not recompute:
        return trace_audit.main(path)
    from hpcsync.config.user_code import import_beside, user_code
    from hpcsync.simulator import recompute as again
    from hpcsync.simulator.simulated_again import is_simulation, simulated_again
    from hpcsync.trace.reader import Trace, load

    def checks(trace: Trace) -> list[trace_audit.Check]:
        if (code := user_code(trace.job)) is not None:
            print(f"importing the workload from {code}", flush=True)
        if is_simulation(trace):
            return simulated_again(trace)
        return again.recompute(trace, say=lambda line: print(line, flush=True))

    import_beside(".")
    try:
        if not is_simulation(trace := load(path)):
            again.check_determined(trace)
        return trace_audit.main(path, further=checks)
    except again.NotRecomputed as error:
        raise JobError(f"{path}: cannot be recomputed: {error}") from None
