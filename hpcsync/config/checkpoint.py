"""The `[checkpoint]` of the job file: how often all that a run consists of is written down."""

from __future__ import annotations

from hpcsync.config.base import Count, NotNegative, Table


class Checkpoint(Table):
    """How long after one checkpoint the next is begun, in seconds or updates, whichever comes first, and how many are
    kept. `seconds` 0: none because of the time; a signal always brings one about."""

    seconds: NotNegative = 600.0
    updates: Count | None = None
    keep: Count = 2

    def due(self, since_s: float, since_updates: int) -> bool:
        """Whether it is time, so long after the last one."""
        return 0 < self.seconds <= since_s or (self.updates is not None and since_updates >= self.updates)
