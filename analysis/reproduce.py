"""Test published claims about synchronisation in virtual time: the claim, the result, and whether it holds.

Finished simulations stay in the folder and are not repeated, so an interrupted command can be continued.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import arguments
from reproductions import advise as advice_regret
from reproductions import ashl as ashl_paper
from reproductions import (
    cpu_load,
    dssp_map,
    dssp_map_real,
    first_k,
    first_k_real,
    gossip_variants,
    long_iterations,
    stanza_learning,
    stanza_real,
)
from reproductions import dssp as dssp_paper
from reproductions import gossip as gossip_paper
from reproductions import images as drawn
from reproductions import law as law_of_delay
from reproductions import stanza as stanza_paper
from reproductions import text as harder

CORES = len(os.sched_getaffinity(0))

app = typer.Typer(help=__doc__, no_args_is_help=True, **arguments.PLAIN)


def writable(out: Path | None) -> Path | None:
    arguments.writable((out or Path("reproductions")) / "claims.csv")
    return out


def known(patterns: list[str] | None) -> list[str] | None:
    """Refuse a pattern that no setting has."""
    names = [str(setting) for setting in advice_regret.settings()]
    for pattern in patterns or ():
        if not any(fnmatch(name, pattern) for name in names):
            raise typer.BadParameter(f"{pattern}: must be or match one of {'; '.join(names)}")
    return patterns


Out = Annotated[Path | None, typer.Option("-o", "--out", callback=writable, help="Default: reproductions/NAME.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each experiment.")]
Processes = Annotated[int, typer.Option(min=1, help="Simulations at a time.")]


@app.callback()
def main() -> None: ...


@app.command()
def dssp(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
    by_map: Annotated[bool, typer.Option("--map", help="Over the workers' speed ratio and jitter.")] = False,
    real: Annotated[bool, typer.Option("--real", help="Four points of the map on real ranks, one at a time.")] = False,
) -> None:
    """Dynamic stale synchronous parallel (Zhao et al., ICDCS 2019)."""
    arguments.at_most_one(map=by_map, real=real)
    if real:
        dssp_map_real.reproduce(out or Path("reproductions/dssp-real"), seeds, Console())
    elif by_map:
        dssp_map.reproduce(out or Path("reproductions/dssp-map"), seeds, processes, Console())
    else:
        dssp_paper.reproduce(out or Path("reproductions/dssp"), seeds, processes, Console())


@app.command()
def gossip(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
    variants: Annotated[
        bool, typer.Option("--variants", help="With decaying rates: synchronous, other beta, other periods.")
    ] = False,
) -> None:
    """How to scale distributed deep learning? (Jin et al., 2016)."""
    if variants:
        gossip_variants.reproduce(out or Path("reproductions/gossip-variants"), seeds, processes, Console())
        return
    gossip_paper.reproduce(out or Path("reproductions/gossip"), seeds, processes, Console())


@app.command()
def k_sync(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
    real: Annotated[bool, typer.Option("--real", help="A few of them on real ranks, one run at a time.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Iterations of 290 ms: predictors; k beside batches.")] = False,
    load: Annotated[bool, typer.Option("--load", help="Predictors that know the CPU load, on recorded times.")] = False,
) -> None:
    """Adaptive k and batch sizes by speed (Yu et al., HPCC 2019), and k by the loss (Dutta et al., AdaSync, 2020)."""
    arguments.at_most_one(real=real, long=long, load=load)
    if real:
        first_k_real.reproduce(out or Path("reproductions/k-sync-real"), seeds, Console())
    elif long:
        long_iterations.reproduce(out or Path("reproductions/k-sync-long"), seeds, processes, Console())
    elif load:
        cpu_load.reproduce(out or Path("reproductions/cpu-load"), seeds, Console())
    else:
        first_k.reproduce(out or Path("reproductions/k-sync"), seeds, processes, Console())


@app.command()
def ashl(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
    searches: Annotated[
        bool, typer.Option("--searches", help="ADSP by how it finds its commits, and ASHL beside each.")
    ] = False,
    readings: Annotated[
        bool, typer.Option("--readings", help="Both readings of when ASHL applies the commit of a worker that waits.")
    ] = False,
) -> None:
    """ASHL (Shen et al., 2024) and ADSP (Hu, Wang and Wu, 2020)."""
    arguments.at_most_one(searches=searches, readings=readings)
    if readings:
        ashl_paper.reproduce_readings(out or Path("reproductions/ashl-readings"), seeds, processes, Console())
        return
    if searches:
        ashl_paper.reproduce_searches(out or Path("reproductions/ashl-searches"), seeds, processes, Console())
        return
    ashl_paper.reproduce(out or Path("reproductions/ashl"), seeds, processes, Console())


@app.command()
def stanza(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
    real: Annotated[bool, typer.Option("--real", help="On four hosts with slow links, one run at a time.")] = False,
    learning: Annotated[bool, typer.Option("--learning", help="With real gradients: accuracy against time.")] = False,
) -> None:
    """Stanza (Wu, Xu, Li and Xiong, 2018)."""
    arguments.at_most_one(real=real, learning=learning)
    if real:
        stanza_real.reproduce(out or Path("reproductions/stanza-real"), seeds, Console())
    elif learning:
        stanza_learning.reproduce(out or Path("reproductions/stanza-learning"), seeds, processes, Console())
    else:
        stanza_paper.reproduce(out or Path("reproductions/stanza"), seeds, processes, Console())


@app.command()
def text(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
) -> None:
    """All lines of work once more, on a transformer that learns text."""
    harder.reproduce(out or Path("reproductions/text"), seeds, processes, Console())


@app.command()
def images(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = CORES,
) -> None:
    """All lines of work once more, on a residual network with BatchNorm that learns drawn images."""
    drawn.reproduce(out or Path("reproductions/images"), seeds, processes, Console())


@app.command()
def law(
    out: Out = None,
    seeds: Seeds = 2,
    processes: Processes = CORES,
) -> None:
    """Gradients to a target from batch, delay and gradient noise (McCandlish et al., 2018; Koloskova et al., 2022)."""
    law_of_delay.reproduce(out or Path("reproductions/law"), seeds, processes, Console())


@app.command()
def advise(
    out: Out = None,
    seeds: Seeds = 3,
    processes: Processes = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(callback=known, metavar="SETTING", help="Such as digits-equal-0 or 'text-*'; all else."),
    ] = None,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Advise from shuffled times too, as a negative control.")
    ] = False,
) -> None:
    """Regret of hpcsync advise: every candidate on real ranks, one run at a time, beside the one that was advised."""
    chosen = [each for each in advice_regret.settings() if not only or any(fnmatch(str(each), part) for part in only)]
    advice_regret.reproduce(out or Path("reproductions/advise"), seeds, processes, Console(), chosen, shuffled)


if __name__ == "__main__":
    app()
