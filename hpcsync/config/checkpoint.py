"""The `[checkpoint]` of the job file: when checkpoints are written."""

from __future__ import annotations

from hpcsync.config.base import Count, NotNegative, Table


class Checkpoint(Table):
    """Schedule of checkpoints. A signal always triggers one.

    Parameters
    ----------
    seconds
        Seconds from one checkpoint to the next; 0: no checkpoints by time.
    updates
        Updates from one checkpoint to the next. Whichever limit is reached first applies.
    keep
        Number of checkpoints to keep.
    """

    seconds: NotNegative = 600.0
    updates: Count | None = None
    keep: Count = 2

    def due(self, since_s: float, since_updates: int) -> bool:
        """Return True if a checkpoint is due, so many seconds and updates after the last one."""
        return 0 < self.seconds <= since_s or (self.updates is not None and since_updates >= self.updates)
