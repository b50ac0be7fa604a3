"""How long updates take in virtual time, without arithmetic."""

from __future__ import annotations

import tomllib
from typing import Any

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.job_validation import check
from hpcsync.core.stanza_resolution import resolved
from hpcsync.simulator.simulate import prepare


class _Times(Recorder):
    """Recorder that keeps the time and the number of the last update."""

    now_s = 0.0
    version = 0

    def append(self, table: str, row: tuple[Any, ...]) -> None:
        if table == "updates":
            self.version, self.now_s = row[:2]


def updates_s(job: Job, n_updates: int) -> float:
    """Return the mean seconds from one update of a job to the next, over its first updates.

    Raises
    ------
    JobError
        If the job cannot be simulated.
    """
    assert not isinstance(job.workload, Script)
    size = sum(parameter.numel() for parameter in check(job).model.parameters())
    table: dict[str, Any] = tomllib.loads(job.to_toml())
    table["workload"] = {"name": "timing", "parameters": size, "batch_size": job.workload.batch_size}
    table |= {"stop": {"updates": n_updates}, "evaluation": {"every_samples": 0}}
    timed = Job.from_table(table)
    workload = check(timed)
    trace = _Times()
    prepare(resolved(timed, workload), workload)(trace, lambda now_s, coordinator: None).run()
    return trace.now_s / trace.version
