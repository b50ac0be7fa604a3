"""Names of the checks that a trace fails."""

from collections.abc import Callable

from hpcsync.audit.bounds import check_bounds
from hpcsync.audit.check import Check
from hpcsync.audit.server_recount import Recount
from hpcsync.audit.trace_audit import audit
from hpcsync.trace.reader import Trace


def failing(trace: Trace, checks: Callable[[Recount], list[Check]] | None = None) -> set[str]:
    """Return those of the whole audit, or of some checks of the recount."""
    return {check.name for check in (checks(Recount(trace)) if checks else audit(trace)) if not check.passed}


def failing_bounds(trace: Trace) -> set[str]:
    """Return those of the checks of the paradigm's guarantees."""
    return failing(trace, check_bounds)
