"""Parts of a trace under paradigms that follow each other, each recounted as the trace of a run under one of them.

The decision "switch" ends a part. Iterations, versions and `seq` keep their numbers in the next one, and the departures
of workers that are away at the switch come first in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpcsync.audit.check import Check
from hpcsync.audit.server_recount import NUMBERED, Recount
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.trace.iteration_counts import NEVER
from hpcsync.trace.schema import Change, Rows


def by_phase(recount: Recount, check: Callable[[Recount], list[Check]]) -> list[Check]:
    """Return these checks of the whole trace, or of each part if paradigms follow each other."""
    phases = recount.job.paradigm.phases
    if len(phases) == 1:
        return check(recount)
    return [
        replace(each, name=f"under {phase.name}: {each.name}")
        for phase, part in zip(phases, parts(recount), strict=False)
        for each in check(part)
    ]


def parts(recount: Recount) -> list[Recount]:
    """Return the parts of a trace under two paradigms, or only the first if there was no switch."""
    first, second = recount.job.paradigm.phases
    at = recount.switch_seq
    if at == NEVER:
        return [_part(recount, first, slice(None), after=-1, upto=NEVER)]
    n_updates = updates_before(recount, at)
    return [
        _part(recount, first, slice(None, n_updates), after=-1, upto=at),
        _part(recount, second, slice(n_updates, None), after=at, upto=NEVER),
    ]


def updates_before(recount: Recount, seq: int) -> int:
    """Return the number of updates whose contributions all precede this `seq`."""
    return int(np.count_nonzero(recount.complete_seq < seq))


def _part(recount: Recount, paradigm: ParadigmOptions, updates: slice, *, after: int, upto: int) -> Recount:
    trace, tables = recount.trace, dict(recount.trace.tables)
    for name in NUMBERED:
        rows = getattr(recount, name)
        tables[name] = rows[(rows["seq"] > after) & (rows["seq"] < upto)]
    tables["membership"] = np.concatenate([_departures(recount, after), tables["membership"]])
    tables["updates"] = recount.updates[updates]
    job = recount.job.model_copy(update={"paradigm": paradigm})
    status = trace.status if recount.switch_seq == NEVER else "finished"  # no row of a part can be missing
    return Recount(
        replace(trace, tables=tables, attributes={**trace.attributes, "job": job.to_toml(), "status": status})
    )


def _departures(recount: Recount, seq: int) -> Rows:
    """Return the departures of the workers that are away at this `seq`."""
    earlier = recount.membership[recount.membership["seq"] < seq]
    _, last = np.unique(earlier["worker"][::-1], return_index=True)
    rows = np.sort(earlier[::-1][last], order="seq")
    return rows[rows["change"] != Change.JOINED]
