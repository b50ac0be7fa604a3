"""Compare predictions from a loop recorded under DistributedDataParallel with the same loop under `hpcsync.connect`.

    python analysis/beside_recording.py [--rounds 3] [--wide] [-o FOLDER]

A round records the loop (`recorded_loop.py`, three processes with gloo, one of them half as fast) and then trains as
many samples under each paradigm. FOLDER/beside_recording.csv has the results, with the load of the machine. The exit
status is 1 if a prediction is off by more than 10 %, or missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pandas
import typer
from rich.console import Console
from rich.table import Table

import arguments
from hpcsync.simulator.what_if import study
from hpcsync.trace.reader import load

LOOP = str(Path(__file__).with_name("recorded_loop.py"))
TOLERANCE = 0.1
N_WORKERS = 3
BY_SPEED = "bsp, batches by speed"
RUNS: dict[str, dict[str, Any]] = {
    "allreduce": {"paradigm": {"name": "allreduce"}},
    "bsp": {"paradigm": {"name": "bsp"}},
    BY_SPEED: {"paradigm": {"name": "bsp"}, "batches": {"policy": "equal-finish", "total": 32 * N_WORKERS}},
    "k-sync": {"paradigm": {"name": "k-sync", "k": 2}},
    "asp": {"paradigm": {"name": "asp"}},
}
NARROW = {"width": 256, "pad_s": [0.03, 0.03, 0.06], "load_s": 0.004, "samples": 9600}
WIDE = {"width": 32_768, "pad_s": [0.1, 0.1, 0.2], "load_s": 0.004, "samples": 3840}  # 2.5 million parameters


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Recordings, each with a run of every paradigm.")] = 3,
    wide: Annotated[bool, typer.Option("--wide", help="A model of 10 MB in place of 77 kB.")] = False,
    out: Annotated[Path, typer.Option("-o", help="Folder for the runs and the table.")] = Path("beside_recording"),
) -> None:
    """Compare predictions from a recorded loop with the same loop under hpcsync.connect."""
    arguments.new(out).mkdir(parents=True)
    settings = WIDE if wide else NARROW
    rows = [row for i in range(rounds) for row in one_round(settings, out / str(i))]
    frame = pandas.DataFrame(rows)
    frame.to_csv(out / "beside_recording.csv", index=False)
    Console(width=100).print(table(frame))
    worst = difference(frame)
    print(f"largest difference: {worst:.1%} (at most {TOLERANCE:.0%} is asked for)")
    raise typer.Exit(int(not worst <= TOLERANCE))


def one_round(settings: dict[str, Any], folder: Path) -> list[dict[str, object]]:
    """Record the loop, train it under every paradigm, and return a row for each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_WORKERS}"]
    recorded = folder / "recorded"
    run([*torchrun, LOOP, "record"], {**settings, "out": str(recorded)})
    others = [RUNS[name]["paradigm"] for name in ("bsp", "k-sync", "asp")]
    found = study(load(recorded), others)
    predicted_s = dict(zip(("bsp", "k-sync", "asp"), found.others_s.values(), strict=True))
    predicted_s |= {"allreduce": found.replayed_s, BY_SPEED: found.by_speed_s or float("nan")}
    rows = []
    for name, given in RUNS.items():
        n_ranks = N_WORKERS + (name != "allreduce")
        launch = [sys.executable, "-m", "hpcsync", "launch", "-n", str(n_ranks), "--", sys.executable]
        run([*launch, LOOP, "connect"], {**settings, **given, "out": str(folder / name)})
        updates = load(folder / name).tables["updates"]
        took_s = float(updates["now_s"][updates["samples"] >= settings["samples"]][0])
        load_1 = os.getloadavg()[0]
        rows.append({"paradigm": name, "predicted_s": predicted_s[name], "took_s": took_s, "load": load_1})
    return rows


def run(line: list[str], settings: dict[str, Any]) -> None:
    print(settings["out"], flush=True)
    subprocess.run([*line, json.dumps(settings)], check=True, stdout=subprocess.DEVNULL)


def difference(frame: pandas.DataFrame) -> float:
    """Return the largest relative difference; NaN if a prediction is missing."""
    return float((frame.predicted_s / frame.took_s - 1).abs().max(skipna=False))


def table(frame: pandas.DataFrame) -> Table:
    result = Table(box=None, pad_edge=False)
    for column in ("", "predicted, s", "took, s", "largest difference", "load"):
        result.add_column(column, justify="right" if column else "left")
    for name, own in frame.groupby("paradigm", sort=False):
        worst = difference(own)
        seconds = (", ".join(f"{s:.2f}" for s in column) for column in (own.predicted_s, own.took_s))
        result.add_row(str(name), *seconds, f"{worst:.1%}", f"{own.load.min():.1f} to {own.load.max():.1f}")
    return result


if __name__ == "__main__":
    arguments.run(main)
