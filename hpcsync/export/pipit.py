"""A run as CSV that Pipit reads (`pipit.Trace.from_csv`): an Enter and a Leave for each span, an Instant for an event.

Pipit sorts the rows by time alone, and matches a Leave with an Enter of the same name in that order. The times of a
process therefore differ: a span is left in its last nanosecond, one before the next span may be entered.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from hpcsync.export.spans import SERVERS, instants, spans_of_part
from hpcsync.export.window import Part, parts
from hpcsync.system.atomic_files import whole
from hpcsync.trace.reader import Trace, TraceFile

TIME, KIND, NAME, PROCESS = COLUMNS = "Timestamp (ns)", "Event Type", "Name", "Process"


def write(trace: Trace | TraceFile, file: Path, from_s: float = 0.0, to_s: float = math.inf) -> None:
    """Write the CSV of these seconds of a run, part by part. Raises NotWritten if that is not possible."""
    with whole(file) as path, path.open("w", encoding="utf-8") as lines:
        for number, part in enumerate(parts(trace, from_s, to_s)):
            rows(part).to_csv(lines, index=False, header=number == 0)


def rows(part: Part) -> pd.DataFrame:
    """Return the rows of a part of a run, ordered by time.

    Returns
    -------
    pandas.DataFrame
        The columns `COLUMNS`. A process is a rank: servers first, then workers. Updates and switches are those of
        server 0, which decides.
    """
    trace = part.trace
    bars, events = spans_of_part(part), instants(trace, part.end_s)
    n_servers = trace.job.cluster.servers
    rank_of_events = np.where(events["worker"] == SERVERS, 0, events["worker"] + n_servers)
    columns = [
        (bars["begin_ns"], "Enter", bars["activity"], bars["worker"] + n_servers),
        (bars["end_ns"] - 1, "Leave", bars["activity"], bars["worker"] + n_servers),
        (events["now_ns"], "Instant", events["activity"], rank_of_events),
    ]
    frame = pd.concat(pd.DataFrame(dict(zip(COLUMNS, each, strict=True))) for each in columns)
    return frame.sort_values(TIME, kind="stable", ignore_index=True)
