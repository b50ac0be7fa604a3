"""A run as CSV that Pipit reads (`pipit.Trace.from_csv`): an Enter and a Leave for each span, an Instant for an event.

Pipit sorts the rows by time alone, and matches a Leave with an Enter of the same name in that order. The times of a
process therefore differ: a span is left in its last nanosecond, one before the next span may be entered.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from hpcsync.export.spans import SERVERS, instants, spans
from hpcsync.system.atomic_files import whole
from hpcsync.trace.reader import Trace

TIME, KIND, NAME, PROCESS = COLUMNS = "Timestamp (ns)", "Event Type", "Name", "Process"


def write(trace: Trace, file: Path) -> None:
    """Write the CSV of a run. Raises NotWritten if that is not possible."""
    with whole(file) as path, path.open("w", encoding="utf-8") as lines:
        rows(trace).to_csv(lines, index=False)


def rows(trace: Trace) -> pd.DataFrame:
    """Return the rows of a run, ordered by time.

    Returns
    -------
    pandas.DataFrame
        The columns `COLUMNS`. A process is a rank: servers first, then workers. Updates and switches are those of
        server 0, which decides.
    """
    bars, events = spans(trace), instants(trace)
    n_servers = trace.job.cluster.servers
    rank_of_events = np.where(events["worker"] == SERVERS, 0, events["worker"] + n_servers)
    parts = [
        (bars["begin_ns"], "Enter", bars["activity"], bars["worker"] + n_servers),
        (bars["end_ns"] - 1, "Leave", bars["activity"], bars["worker"] + n_servers),
        (events["now_ns"], "Instant", events["activity"], rank_of_events),
    ]
    frame = pd.concat(pd.DataFrame(dict(zip(COLUMNS, part, strict=True))) for part in parts)
    return frame.sort_values(TIME, kind="stable", ignore_index=True)
