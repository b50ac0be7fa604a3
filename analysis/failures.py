"""What failures and stalls cost under each paradigm, in virtual time.

    python analysis/failures.py [--seeds 3] [-o FOLDER]

Eight workers train for as long as ten hours without failures take. Workers fail at random moments, on average
`FAILURES` times an hour in all, and are back after `BACK_S`. Under `on_death = "continue"` the others train meanwhile;
a worker fails between two iterations. Under `on_death = "restart"` every failure ends the run, which resumes from its
last checkpoint after `BACK_S`, and repeats what it had done since.

A worker that stalls stands still for `BACK_S` within one iteration, and then continues: nothing is lost, but workers
that wait for it stand still, too.

FOLDER/failures.csv has all durations; the figure is FOLDER/failures.png and .svg.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

import arguments
from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.simulator.simulate import simulate
from hpcsync.trace.reader import load

HOUR_S = 3600.0
# Guesses; the number of failures an hour and the time between two checkpoints are swept.
WORKERS, ITERATION_S, JITTER = 8, 10.0, 0.1
BACK_S = 300.0  # until a failed worker, or the whole run, trains again
CHECKPOINT_S = 30.0  # during which no worker computes
FAILURES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # an hour, of all workers together; and as many stalls
EVERY_S = (300.0, 600.0, 1800.0, 3600.0)  # of training between two checkpoints
CONTINUED: dict[str, dict[str, Any]] = {
    "BSP": {"name": "bsp"},
    "ASP": {"name": "asp"},
    "SSP, s = 3": {"name": "ssp", "staleness": 3},
    "EASGD": {"name": "easgd", "period": 4},
}
STALLED: dict[str, dict[str, Any]] = {**CONTINUED, "all-reduce": {"name": "allreduce"}}
WITHOUT = {"failures": "failures and checkpoints", "stalls": "stalls"}  # the run to which others are compared
LONGEST_S = 2000 * HOUR_S  # a run that restarts may take; failures come until then


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    out: Annotated[Path, typer.Option("-o", help="Folder for the table and the figure.")] = Path("failures"),
) -> None:
    """Simulate what failures and stalls cost under each paradigm."""
    arguments.new(out / "failures.csv")
    frame = pd.DataFrame([row for seed in range(1, seeds + 1) for row in durations(seed)])
    frame["cost"] = frame["hours"] / frame.groupby(["method", "seed"])["undisturbed_hours"].transform("first") - 1
    out.mkdir(parents=True, exist_ok=True)
    draw(frame, out)
    Console().print(*(table(frame, event) for event in ("failures", "stalls")))


def durations(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the durations of one seed, under every method and number of failures, and of stalls."""
    undisturbed = {name: simulated_s(paradigm, seed, []) for name, paradigm in STALLED.items()}

    def row(event: str, method: str, per_hour: float, took_s: float, undisturbed_s: float) -> dict[str, Any]:
        hours = {"hours": took_s / HOUR_S, "undisturbed_hours": undisturbed_s / HOUR_S}
        return {"event": event, "method": method, "seed": seed, "per_hour": per_hour, **hours}

    for name, paradigm in CONTINUED.items():
        for per_hour in FAILURES:
            events = absences(per_hour, seed, 3 * undisturbed[name])
            took_s = simulated_s(paradigm, seed, events) if events else undisturbed[name]
            yield row("failures", f"{name}, others continue", per_hour, took_s, undisturbed[name])
    for every_s in EVERY_S:
        for per_hour in FAILURES:
            took_s = simulated_s(STALLED["all-reduce"], seed, deaths(per_hour, seed), every_s)
            name = f"all-reduce, all resume, every {every_s / 60:g} min"
            yield row("failures", name, per_hour, took_s, undisturbed["all-reduce"])
    for name, paradigm in STALLED.items():
        for per_hour in FAILURES:
            took_s = simulated_s(paradigm, seed, stalls(per_hour, seed)) if per_hour else undisturbed[name]
            yield row("stalls", name, per_hour, took_s, undisturbed[name])


# ---- one run ----


def simulated_s(
    paradigm: dict[str, Any], seed: int, events: list[dict[str, Any]], every_s: float | None = None
) -> float:
    """Return the duration of a run with these events, in seconds.

    With `every_s` it makes checkpoints, and trains for so many seconds between two of them.
    """
    samples = int(10 * HOUR_S / ITERATION_S) * WORKERS * 32
    restarts = {} if every_s is None else {"on_death": "restart", "checkpoint_s": CHECKPOINT_S}
    job = Job.from_table(
        {
            "name": "failures",
            "seed": seed,
            "workload": {"name": "timing", "batch_size": 32, "parameters": 1000},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "stop": {"samples": samples},
            "checkpoint": {"seconds": (every_s or 0.0) + CHECKPOINT_S},  # from one to the next
            "paradigm": paradigm,
            "cluster": {
                "workers": WORKERS,
                "servers": int(paradigm["name"] != "allreduce"),
                "compute": {"model": "lognormal", "seconds": ITERATION_S, "jitter": JITTER},
                "events": events,
                **restarts,
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        if simulate(job, Path(folder) / "run", Console(quiet=True)):
            raise SystemExit("a simulation failed")
        took_s = float(load(Path(folder) / "run").tables["updates"]["now_s"][-1])
    assert took_s < LONGEST_S
    return took_s


def moments(per_hour: float, seed: int) -> Iterator[float]:
    """Yield the times between failures, exponentially distributed, in seconds; inf without failures."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.exponential(HOUR_S / per_hour) if per_hour else np.inf


def absences(per_hour: float, seed: int, until_s: float) -> list[dict[str, Any]]:
    """Return events by which workers fail and come back until this time.

    A worker that fails while it is away, or while no other would be left, does not fail.
    """
    rng, back_s, now_s = np.random.default_rng(seed), np.zeros(WORKERS), 0.0
    events: list[dict[str, Any]] = []
    for gap_s in moments(per_hour, seed):
        now_s += gap_s
        if now_s > until_s:
            return events
        worker = int(rng.integers(WORKERS))
        if back_s[worker] < now_s and (back_s > now_s).sum() < WORKERS - 1:
            back_s[worker] = now_s + BACK_S
            times = (("leave", now_s), ("join", now_s + BACK_S))
            events += [{"worker": worker, "change": change, "at_s": float(at_s)} for change, at_s in times]
    raise AssertionError


def deaths(per_hour: float, seed: int) -> list[dict[str, Any]]:
    """Return events by which the run restarts after `BACK_S`; while it does so no failure happens."""
    events: list[dict[str, Any]] = []
    now_s = 0.0
    for gap_s in moments(per_hour, seed):
        now_s += gap_s
        if now_s > LONGEST_S:
            return events
        events.append({"worker": 0, "at_s": now_s, "change": "die", "restart_s": BACK_S})
        now_s += BACK_S
    raise AssertionError


def stalls(per_hour: float, seed: int) -> list[dict[str, Any]]:
    """Return events by which one iteration of a worker now and then takes `BACK_S` longer than usual.

    They come at so many iterations an hour of training: while a worker stands still, it cannot stall again.
    """
    rng, iteration = np.random.default_rng(seed), np.ones(WORKERS, int)
    events: list[dict[str, Any]] = []
    now_s = 0.0
    for gap_s in moments(per_hour, seed):
        now_s += gap_s
        if now_s > 20 * HOUR_S:  # the fastest worker under ASP is not there yet when the run ends
            return events
        worker = int(rng.integers(WORKERS))
        at = max(int(now_s / ITERATION_S), iteration[worker])
        iteration[worker] = at + 1
        changes: list[dict[str, Any]] = [{"change": "slow", "factor": 1 + BACK_S / ITERATION_S}, {"change": "recover"}]
        events += [{"worker": worker, "at_iteration": int(at) + n, **change} for n, change in enumerate(changes)]
    raise AssertionError


# ---- what is shown ----


def draw(frame: pd.DataFrame, folder: Path) -> None:
    """Draw the cost against failures and stalls per hour, of the methods whose costs differ."""
    equal = [*(f"{name}, others continue" for name in list(CONTINUED)[1:]), "EASGD", "all-reduce"]  # to others
    with plotting.style():
        figure, axes = plotting.panels(2, height=5.0)
        for axis, event, top in zip(axes[:, 0], ("failures", "stalls"), (1.2, 0.4), strict=True):
            of_event = frame[(frame["event"] == event) & ~frame["method"].isin(equal)]
            for n, (method, rows) in enumerate(of_event.groupby("method", sort=False)):
                costs = rows.groupby("per_hour")["cost"]
                mean, look = costs.mean(), plotting.DASHES[n % len(plotting.DASHES)]
                words = str(method).replace("all resume, every", "checkpoints every")
                own = {"color": colour(str(method)), "linestyle": look, "marker": "osD^v"[n], "ms": 3}
                axis.plot(mean.index, mean, label=words, **own)
                axis.fill_between(mean.index, costs.min(), costs.max(), color=own["color"], alpha=0.15, lw=0)
            axis.set(xlabel=f"{event} an hour, of {WORKERS} workers", xlim=(0, None), ylim=(0, top))
            axis.set_ylabel(f"longer than without\n{WITHOUT[event]}")
            axis.yaxis.set_major_formatter(plotting.percent)
            axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        plotting.save(figure, frame.round(4), folder, "failures")


def colour(method: str) -> str:
    """Return the colour of a method's paradigm."""
    return next(plotting.PARADIGM_COLOURS[table["name"]] for name, table in STALLED.items() if method.startswith(name))


def table(frame: pd.DataFrame, event: str) -> Table:
    """Return the mean cost of each method."""
    shown = Table(title=f"longer than without {WITHOUT[event]}", box=None)
    shown.add_column(f"{event} an hour")
    for per_hour in FAILURES:
        shown.add_column(f"{per_hour:g}", justify="right")
    for method, rows in frame[frame["event"] == event].groupby("method", sort=False):
        costs = rows.groupby("per_hour")["cost"].mean()
        shown.add_row(str(method), *(f"{100 * cost:.1f} %" for cost in costs))
    return shown


if __name__ == "__main__":
    arguments.run(main)
