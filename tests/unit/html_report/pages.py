"""Small runs for the tests of reports: simulated in this process, in a fraction of a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcsync.cli import run
from hpcsync.html_report.run_data import RunData, read
from hpcsync.report.summary import summarize
from hpcsync.trace.reader import opened

JOB = """
name = "small"
seed = 5
workload = {name = "linear"}
optimizer = {name = "sgd", lr = 0.02}
stop = {updates = 120, target_loss = 0.3}
evaluation.every_samples = 64
paradigm = {name = "bsp"}
cluster = {workers = 3, compute = {seconds = [0.1, 0.1, 0.3], jitter = 0.05, model = "lognormal"}}
"""


def simulated(folder: Path, *overrides: str) -> Path:
    """Return the folder of a run of the job in virtual time."""
    job = folder / "small.toml"
    job.write_text(JOB)
    out = folder / "-".join(["run", *(word.replace("/", "-").replace('"', "") for word in overrides)])
    assert run.simulate(job, list(overrides), out, None) == 0
    return out


def data(folder: Path, *overrides: str) -> RunData:
    path = simulated(folder, *overrides) / "trace.h5"
    with opened(path) as trace:
        summary = summarize(trace)
    return read(path, summary)


def seeds(folder: Path, paradigm: str, numbers: Sequence[int] = (1, 2, 3)) -> list[RunData]:
    return [data(folder, f"paradigm={paradigm}", f"seed={number}") for number in numbers]


def variants(folder: Path) -> dict[str, list[RunData]]:
    return {
        "bsp": seeds(folder, '{name = "bsp"}'),
        "dssp": seeds(folder, '{name = "dssp", staleness_min = 1, staleness_max = 4}'),
    }
