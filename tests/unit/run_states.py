"""Rank 0's part of a checkpoint, for tests that need no run."""

from __future__ import annotations

from typing import Any

from hpcsync.config.job import Job
from hpcsync.core.coordinator import coordinate
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.run_dir.checkpoint import RunState
from hpcsync.state import plain
from tests.unit.jobs import make_job


class Nothing:
    def append(self, table: str, row: tuple[object, ...]) -> None: ...


def run_state(job: Job | None = None, **changes: Any) -> dict[str, Any]:
    """Return the state of a run of this job that has just begun, with these changes."""
    job = job or make_job()
    trace = Nothing()
    coordinator = coordinate(job, trace) if job.has_servers else PeerCoordinator(job, trace)
    run = RunState(job.to_toml(), 0.0, 1, {}, coordinator.state(), None, [])
    return plain(run) | changes
