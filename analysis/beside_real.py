"""Compare simulations with real ranks: every paradigm on ranks, then in virtual time with the times measured there.

    python analysis/beside_real.py [--seeds 3] [-o FOLDER]
    python analysis/beside_real.py --hosts [--only bsp --only allreduce] [--rate 1gbit]

Each run is first simulated from its own trace, to compare the order of grants and the total time. Then every paradigm
is simulated from the trace of the asynchronous run, which has no bound, and compared with its own run. The results are
written to FOLDER/beside_real.csv (a new folder each time). The exit status is 1 if a total time simulated from the
run's own trace is off by more than 5 %.

With --hosts the ranks are on hosts with shaped links, and the simulation has the link as it was measured
(`beside_hosts.py`); FOLDER/beside_hosts.csv has the results. Finished runs stay in the folder and are not repeated. The
exit status is 1 if samples a second are off by more than 5 % or waiting by more than 3 percentage points.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pandas
import typer
from rich.console import Console
from rich.table import Table

import arguments
import beside_hosts
from hpcsync.report.trace_pair import compare
from hpcsync.system.namespaces import Unavailable
from hpcsync.trace.reader import load

JOBS = Path(__file__).parents[1] / "jobs"
PARADIGMS = ("bsp", "asp", "ssp", "dssp")
TOLERANCE = 0.05
SETTINGS = (  # one worker is half as fast, and nobody stops early
    "cluster.workers=3",
    'cluster.compute={model="lognormal", seconds=[0.02, 0.02, 0.04], jitter=0.2}',
    "stop={samples=16_000}",
    "evaluation.every_samples=4_000",
)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each paradigm.")] = 3,
    out: Annotated[Path, typer.Option("-o", help="Folder for the runs and the table.")] = Path("beside_real"),
    hosts: Annotated[bool, typer.Option("--hosts", help="On four hosts with shaped links; needs root.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(callback=arguments.among(beside_hosts.METHODS), help="With --hosts: these paradigms."),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(callback=arguments.among(beside_hosts.RATES), help="With --hosts: links of this rate."),
    ] = None,
) -> None:
    """Compare simulations with runs on real ranks, under every paradigm."""
    if hosts:
        arguments.writable(out / "beside_hosts.csv")
        try:
            frame = beside_hosts.compare_on_hosts(
                only or list(beside_hosts.METHODS), rate or list(beside_hosts.RATES), range(1, seeds + 1), out
            )
        except Unavailable as error:
            raise typer.BadParameter(str(error), param_hint="--hosts") from None
        frame.to_csv(out / "beside_hosts.csv", index=False)
        Console(width=120).print(beside_hosts.table(frame))
        missed = beside_hosts.misses(frame)
        print(f"{len(missed)} of {len(frame)} runs miss an aim")
        raise typer.Exit(int(len(missed) > 0))
    if only or rate:
        raise typer.BadParameter("must come with --hosts", param_hint="--only" if only else "--rate")
    arguments.new(out).mkdir(parents=True)
    rows = []
    for seed in range(1, seeds + 1):
        for paradigm in PARADIGMS:
            hpcsync("run", paradigm, seed, out / f"{paradigm}-{seed}")
        for paradigm in PARADIGMS:
            rows += [beside(paradigm, seed, source, out) for source in dict.fromkeys((paradigm, "asp"))]
    frame = pandas.DataFrame(rows)
    frame.to_csv(out / "beside_real.csv", index=False)
    own = frame[frame.times_from == frame.paradigm]
    console = Console(width=100)
    console.print(table("Simulated from the run's own trace", own))
    console.print(table("Simulated from the asp run's trace", frame.drop(own.index)))
    worst = (own.ratio - 1).abs().max(skipna=False)
    console.print(f"largest difference from the run's own trace: {worst:.2%} (at most {TOLERANCE:.0%} is asked for)")
    raise typer.Exit(int(not worst <= TOLERANCE))


def hpcsync(command: str, paradigm: str, seed: int, folder: Path, *more: str) -> None:
    settings = [word for setting in (*SETTINGS, f"seed={seed}") for word in ("--set", setting)]
    line = [
        sys.executable,
        "-m",
        "hpcsync",
        command,
        JOBS / f"digits-{paradigm}.toml",
        *settings,
        "--out",
        folder,
        *more,
    ]
    print(f"{command} {folder}", flush=True)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)


def beside(paradigm: str, seed: int, source: str, out: Path) -> dict[str, object]:
    """The paradigm's real run beside its simulation from the times of `source`'s real run."""
    folder = out / f"{paradigm}-{seed}-from-{source}"
    hpcsync("simulate", paradigm, seed, folder, "--times-from", str(out / f"{source}-{seed}" / "trace.h5"))
    comparison = compare(load(out / f"{paradigm}-{seed}" / "trace.h5"), load(folder / "trace.h5"))
    real, simulated = comparison.sides
    return {
        "paradigm": paradigm,
        "times_from": source,
        "seed": seed,
        "samples": comparison.samples,
        "real_s": real.time_s,
        "simulated_s": simulated.time_s,
        "ratio": comparison.time_ratio,
        "real_wait_share": real.wait_share,
        "simulated_wait_share": simulated.wait_share,
        "same_order": comparison.same_order,
    }


def table(title: str, frame: pandas.DataFrame) -> Table:
    result = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", "seed", "samples", "real", "simulated", "ratio", "waiting: real", "simulated", "same order"):
        result.add_column(column, justify="right" if column else "left")
    for row in frame.itertuples():
        times = (f"{row.real_s:.3f} s", f"{row.simulated_s:.3f} s", f"{row.ratio:.3f}")
        shares = (f"{row.real_wait_share:.1%}", f"{row.simulated_wait_share:.1%}", f"{row.same_order:.1%}")
        result.add_row(row.paradigm, str(row.seed), f"{row.samples:,}", *times, *shares)
    return result


if __name__ == "__main__":
    arguments.run(main)
