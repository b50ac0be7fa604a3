"""The command line: arguments and wiring, no logic. Whatever costs time to import waits until it is needed."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hpcsync.cli import cite, figure
from hpcsync.cli.job_command import JobCommand
from hpcsync.config.errors import JobError
from hpcsync.system import garbage
from hpcsync.system.launcher import LaunchError, expected_rank, under_launcher
from hpcsync.system.signals import left_to_rank_0
from hpcsync.version import __version__

app = typer.Typer(
    help="Train PyTorch models under any synchronisation paradigm, and see what each one costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file, e.g. paradigm.staleness_max=20."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for trace and weights; runs/NAME-TIME/ by default.")
]

Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe", help="Allow more ranks than a small multiple of this machine's cores.", show_default=False
    ),
]


@app.command(cls=JobCommand)
def run(
    job: JobPath,
    ranks: Annotated[
        int | None,
        typer.Option("-n", metavar="RANKS", help="Number of ranks; workers are the ranks that are not servers."),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint in DIR; begin where there is none. A finished run stays as it is.",
            show_default=False,
        ),
    ] = False,
    oversubscribe: Oversubscribe = False,
) -> None:
    """Train. Starts the ranks; under mpirun, mpiexec or srun it is one of them."""
    with told_in_one_line():
        if under_launcher():
            left_to_rank_0()  # before anything slow: a batch system's signal may come at any time
            from hpcsync.run_dir.progress_line import say

            if expected_rank() == 0:
                say("loading libraries")
            from hpcsync.cli import rank_main as one

            sys.exit(one.main(job, overrides or [], ranks, out, resume))
        from hpcsync.cli import run as front

        sys.exit(front.run(job, overrides or [], ranks, out, resume, oversubscribe=oversubscribe))


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    program: Annotated[
        list[str],
        typer.Argument(metavar="-- PROGRAM...", help="`python` is the Python that runs this.", show_default=False),
    ],
    ranks: Annotated[int, typer.Option("-n", metavar="RANKS", help="Number of ranks.", show_default=False)],
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End the ranks then, with status 124.", show_default=False)
    ] = None,
    oversubscribe: Oversubscribe = False,
) -> None:
    """Run a program, such as a training script, on MPI ranks of this machine."""
    from hpcsync.cli import launch as launching

    with told_in_one_line():
        sys.exit(launching.launch(ranks, program, timeout, oversubscribe=oversubscribe))


@app.command(cls=JobCommand)
def simulate(
    job: JobPath,
    overrides: Overrides = None,
    out: Out = None,
    times_from: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Take compute and transfer times from this trace (or folder) of another run.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train in virtual time, on one core: any number of workers, the same decisions, the same trace."""
    with told_in_one_line():
        from hpcsync.cli import run as front

        sys.exit(front.simulate(job, overrides or [], out, times_from))


@app.command(cls=JobCommand)
def show(job: JobPath, overrides: Overrides = None) -> None:
    """What a job resolves to: roles, sizes, bytes per iteration. Nothing runs."""
    from hpcsync.cli import run as front

    with told_in_one_line():
        front.show(job, overrides or [])


@app.command()
def audit(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A trace, or the folder of a run.", show_default=False)
    ],
) -> None:
    """Replay a trace's pushes through a fresh paradigm, compare every grant, and check the invariants."""
    from hpcsync.audit import trace_audit as auditing

    with told_in_one_line():
        sys.exit(auditing.main(trace))


app.command("figure", help=figure.HELP)(figure.command)
app.command("cite")(cite.command)


@app.command()
def doctor() -> None:
    """Which MPI there is, and whether it serves."""
    from hpcsync.cli import doctor as examination

    sys.exit(examination.main())


@app.command()
def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET...]", help="What to measure; everything by default.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where tensors lie; on a GPU there are fewer targets.")
    ] = "cpu",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write every repetition into this file.", show_default=False),
    ] = None,
) -> None:
    """Each primitive beside the machine's own limit, measured in the same job."""
    from hpcsync import bench as benchmark

    with told_in_one_line():
        sys.exit(benchmark.main(targets or [], json, device))


@app.command()
def slurm(
    job: JobPath,
    nodes: Annotated[list[int], typer.Option(metavar="N", help="How many.")],
    ntasks_per_node: Annotated[list[int], typer.Option(metavar="M", help="Ranks of each node.")],
    cpus_per_task: Annotated[list[int], typer.Option(metavar="C", help="And threads, of each rank.")] = [1],  # noqa: B006
    gpus_per_node: Annotated[list[int] | None, typer.Option(metavar="G", show_default=False)] = None,
    partition: Annotated[list[str] | None, typer.Option(metavar="NAME", show_default=False)] = None,
    mem: Annotated[list[str] | None, typer.Option(metavar="SIZE", help="Of a node.", show_default=False)] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="As Slurm writes it.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", show_default=False)] = None,
    array: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[VALUE, ...]", help="A run for each value; of several keys, for each combination."),
    ] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="Make room when asked to, and go on from a checkpoint.")
    ] = False,
    mpi: Annotated[
        str | None, typer.Option(metavar="KIND", help="Of srun; by default what this Python's MPI needs.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print a batch script that trains this job under Slurm. Nothing is submitted.

    What is said of nodes, given several times, is for as many kinds of node: a heterogeneous job.
    """
    from hpcsync.cli import slurm as scripts

    with told_in_one_line():
        asked = scripts.BatchRequest(
            nodes=nodes,
            ntasks_per_node=ntasks_per_node,
            cpus_per_task=cpus_per_task,
            gpus_per_node=gpus_per_node or (),
            partition=partition or (),
            mem=mem or (),
            time=time,
            account=account,
            array=array or (),
            preemptible=preemptible,
            mpi=mpi,
        )
        print(scripts.script(job, overrides or [], asked, shlex.join(["hpcsync", *sys.argv[1:]])), end="")


plan = typer.Typer(
    help="What a way to train would cost on a cluster that is not at hand.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(plan, name="plan")


@plan.command()
def stanza(
    model: Annotated[str, typer.Option(metavar="NAME", help="A well-known network, such as vgg16.")],
    nodes: Annotated[int, typer.Option(metavar="N", help="Of the cluster, at least 2.")],
    bandwidth_gbit: Annotated[float, typer.Option(metavar="B", help="Of every node's link, up and down each.")],
    batch: Annotated[int, typer.Option(metavar="b", help="Samples of a worker's batch.")],
    latency_us: Annotated[float, typer.Option(metavar="L", help="Of a message.")] = 50.0,
    micro_batches: Annotated[int, typer.Option(metavar="M", help="Pieces of a batch, one after the other.")] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML: conv_forward_ms, conv_backward_ms, fc_ms of a batch, perhaps fc_fixed_ms; or else:",
            show_default=False,
        ),
    ] = None,
    samples_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="That a node trains the whole model with; or else it is measured here.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write all numbers into this file.", show_default=False)
    ] = None,
) -> None:
    """How many nodes should train the fully-connected layers, beside parameter servers and all-reduce."""
    from hpcsync.cli import plan as plans

    with told_in_one_line():
        asked = plans.Asked(
            model=model,
            nodes=nodes,
            bandwidth_gbit=bandwidth_gbit,
            batch=batch,
            latency_us=latency_us,
            micro_batches=micro_batches,
            profile=profile,
            samples_per_second=samples_per_second,
            json=json,
        )
        plans.stanza(asked)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hpcsync {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    pass


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """The user's mistakes end the program with status 2 and one line; of many ranks only the first says it.

    Ctrl-C ends it with status 1.
    """
    try:
        yield
    except (JobError, LaunchError) as mistake:
        if expected_rank() == 0:
            print(f"hpcsync: {mistake}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before or after what looks for signals by itself
        print("hpcsync: interrupted", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    garbage.freeze_at_end()
    app(prog_name="hpcsync")
