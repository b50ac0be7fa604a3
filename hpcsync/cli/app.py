"""Command line: arguments and wiring, no logic. Modules that are slow to import are imported when they are needed."""

from __future__ import annotations

import atexit
import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hpcsync.cli.figure import HELP as ABOUT_FIGURES
from hpcsync.cli.job_command import JobCommand
from hpcsync.config.errors import JobError, below, refuse_empty
from hpcsync.system import garbage, standard_output
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.launch_output import wait_until_read
from hpcsync.system.launcher import LaunchError
from hpcsync.system.rank_environment import expected_rank, speaks_for_all, under_launcher
from hpcsync.system.signals import ending_at_once, left_to_rank_0
from hpcsync.version import __version__


@contextlib.contextmanager
def user_errors_in_one_line() -> Iterator[None]:
    """End the program with status 2 and one line on a JobError or LaunchError; with several ranks only rank 0 prints.

    Ctrl-C and a file that cannot be written end it with status 1.
    """
    try:
        yield
    except (JobError, LaunchError) as error:
        if speaks_for_all():
            print(f"hpcsync: {error}{below(error)}", file=sys.stderr)
        sys.exit(2)
    except NotWritten as error:
        print(f"hpcsync: failed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # outside of the code that handles signals itself
        print("hpcsync: interrupted", file=sys.stderr)
        sys.exit(1)


class Commands(TyperGroup):
    """The commands. They end as `user_errors_in_one_line` says; typer would end them by Ctrl-C without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of the context."""
        with user_errors_in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    help="Train PyTorch models under any synchronisation paradigm, and measure what each one costs.\n\n"
    "hpcsync doctor examines the installation, hpcsync run JOB trains a job, and hpcsync COMMAND --help explains a "
    "command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def out_path(text: str) -> Path:
    """Return what --out names. Raises JobError if it is empty."""
    refuse_empty("--out", text)
    return Path(text)


JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job file, e.g. paradigm.staleness_max=20; repeatable."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(parser=out_path, metavar="DIR", help="Folder of the run; runs/NAME-TIME/ by default."),
]
RUNS = typer.Argument(metavar="RUN", help="Traces, or folders with the traces of runs.", show_default=False)
Log = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="tensorboard|wandb|mlflow",
        help="Also log loss, accuracy, samples per second and staleness there.",
        show_default=False,
    ),
]
TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", help="Trace file, or the folder of a run.", show_default=False)
]

Oversubscribe = Annotated[
    bool,
    typer.Option("--oversubscribe", help="Allow more than 8 ranks per core of this machine.", show_default=False),
]


@app.command(cls=JobCommand)
def run(
    job: JobPath,
    ranks: Annotated[
        int | None,
        typer.Option("-n", metavar="RANKS", help="Number of ranks: servers and workers."),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume from the newest checkpoint in DIR, or start anew if there is none. A finished run is not "
            "changed.",
            show_default=False,
        ),
    ] = False,
    oversubscribe: Oversubscribe = False,
    log: Log = None,
    lock: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Train a job on MPI ranks. Under mpirun, mpiexec or srun, this process is one of the ranks."""
    if under_launcher():
        left_to_rank_0(starting=True)  # before anything slow: a batch system may send a signal at any time
        atexit.register(wait_until_read)
        with ending_at_once(), garbage.loading():
            if expected_rank() == 0:
                from hpcsync.run_dir.progress_line import say

                say("loading libraries")
            from hpcsync.cli import rank_main

        sys.exit(rank_main.main(job, overrides or [], ranks, out, resume, lock, log))
    with ending_at_once():
        from hpcsync.cli import run as commands

    sys.exit(commands.run(job, overrides or [], ranks, out, resume, oversubscribe=oversubscribe, log=log))


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="Program and its arguments, after `--`; `python` stands for the Python that runs hpcsync.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option("-n", metavar="RANKS", help="Number of ranks.", show_default=False)],
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="End the ranks after this time, with exit status 124.", show_default=False
        ),
    ] = None,
    oversubscribe: Oversubscribe = False,
) -> None:
    """Run a training script on MPI ranks of this machine."""
    from hpcsync.cli import launch as launching

    sys.exit(launching.launch(ranks, program, timeout, oversubscribe=oversubscribe))


@app.command()
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, or of runs: the one written last is shown.")
    ] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Show the current status and end.", show_default=False)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each status as a line of JSON.", show_default=False)
    ] = False,
) -> None:
    """Watch a run: workers, waiting, decisions, stalls, time left."""
    from hpcsync.cli import watch as watching

    sys.exit(watching.watch(folder, once=once, as_json=as_json))


@app.command(cls=JobCommand)
def simulate(
    job: JobPath,
    overrides: Overrides = None,
    out: Out = None,
    times_from: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Use the computation and transfer times of another run (trace file or folder).",
            show_default=False,
        ),
    ] = None,
    log: Log = None,
) -> None:
    """Train a job in virtual time, on one core.

    Any number of workers is possible. Decisions, gradients and the format of the trace are those of a real run.
    """
    from hpcsync.cli import run as commands

    sys.exit(commands.simulate(job, overrides or [], out, times_from, log))


@app.command(cls=JobCommand)
def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="JOB|RUN", help="Job file (TOML); or a trace, or folder of a run.", show_default=False),
    ],
    overrides: Overrides = None,
    load: Annotated[
        bool, typer.Option("--load", help="Import a workload function of your own, for its sizes.", show_default=False)
    ] = False,
) -> None:
    """Show a job with all defaults, or the summary of a run.

    For a job: roles, sizes, bytes per iteration; nothing is trained. For a run: the table that it printed at its end.
    """
    from hpcsync.cli import run as commands

    commands.show(path, overrides or [], load=load)


@app.command()
def audit(
    trace: TracePath,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Also repeat the training on one core as recorded, and compare losses, evaluations and weights. "
            "Imports a workload of your own.",
        ),
    ] = False,
) -> None:
    """Audit a trace: verify that the run followed its paradigm.

    The audit replays the pushes through a new instance of the paradigm, compares every grant, and checks invariants.
    """
    from hpcsync.cli import audit as command

    sys.exit(command.main(trace, recompute=recompute))


@app.command(cls=JobCommand)
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="JOB|RUN",
            help="Job file (TOML) to run with --vary; or finished runs: traces, or folders with traces.",
            show_default=False,
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=[VALUE, ...]",
            help="Values of a key of the job file; with several keys, every combination is a variant.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Seeds of every variant, starting with that of the job.")
    ] = 3,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=[VALUE, ...]",
            help="Values of a key, such as optimizer.lr; each variant uses the best one on tuning seeds.",
            show_default=False,
        ),
    ] = None,
    tune_seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Tuning seeds of every variant and value.")] = 1,
    virtual: Annotated[
        bool, typer.Option("--simulate", help="Run in virtual time, instead of on MPI ranks.", show_default=False)
    ] = False,
    at_once: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Simulations at the same time; real runs take turns.")
    ] = 1,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=out_path,
            metavar="DIR",
            help="Folder of the runs; runs/NAME-compare/ by default. Finished runs are not repeated.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table as CSV.", show_default=False)
    ] = None,
    latex: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the table for LaTeX (booktabs).", show_default=False),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a report (HTML) of all runs.", show_default=False)
    ] = None,
) -> None:
    """Compare variants of a job, or finished runs, over seeds.

    The table shows which variant is the fastest, and how certain this is. Runs that do not reach the target are counted
    and not averaged. Differences are paired by seed.
    """
    from hpcsync.cli import compare as comparing

    given = (vary or (), seeds, tune or (), tune_seeds, virtual, at_once, overrides or (), out, csv, latex, report)
    sys.exit(comparing.main(paths, comparing.Asked(*given)))


@app.command(cls=JobCommand)
def advise(
    job: JobPath,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="TRACE|DIR",
            help="Use the computation and transfer times of this run, of any paradigm, or of a recorded loop.",
            show_default=False,
        ),
    ] = None,
    paradigms: Annotated[
        list[str] | None,
        typer.Option(
            "--paradigm",
            metavar="NAME|TABLE",
            help="A candidate, such as bsp or '{name = \"k-sync\", k = 3}', instead of those that hpcsync chooses; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        str,
        typer.Option(metavar="N,...", help="Advise for these numbers of workers, in turn.", show_default=False),
    ] = "",
    extrapolate: Annotated[
        bool,
        typer.Option(
            "--extrapolate",
            help="With --from and --workers: extrapolate the measured times to other numbers of workers.",
            show_default=False,
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Seeds of trial 3, starting with that of the job.")
    ] = 3,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            help="End after this time with the result of the last complete trial; several numbers of workers share it.",
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Simulations at the same time.")] = 1,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=out_path,
            metavar="DIR",
            help="Folder of the simulations; runs/NAME-advice/ by default. Finished ones are not repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.", show_default=False)] = False,
) -> None:
    """Find the paradigm that suits a job and its cluster.

    Candidates are simulated in virtual time and ranked by the time to the job's target.
    """
    from hpcsync.cli import advise as advising

    counts = advising.worker_counts(workers)
    given = (measured, paradigms or (), counts, extrapolate, seeds, budget, at_once, overrides or (), out, as_json)
    sys.exit(advising.main(job, advising.Asked(*given)))


@app.command("report")
def report_(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", parser=out_path, metavar="FILE", help="The file, .html."),
    ] = Path("report.html"),
    audited: Annotated[
        bool | None,
        typer.Option(
            "--audit/--no-audit",
            help="Audit all runs, or none; by default as many as half a minute allows.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a report of runs as one HTML file.

    It has figures, tables, the audit and the job, and needs no network.
    """
    from hpcsync.cli import report

    sys.exit(report.main(runs, out, audited=audited))


@app.command()
def explain(
    run: TracePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.", show_default=False)] = False,
    simulated: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Simulate the run with other times.")
    ] = True,
    paradigms: Annotated[
        list[str] | None,
        typer.Option(
            "--paradigm",
            metavar="NAME|TABLE",
            help="Simulate another paradigm with the same times, such as bsp or '{name = \"k-sync\", k = 3}'; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Explain where a run's time went: who waited for whom.

    Simulations show how long it would have taken without stragglers.
    """
    from hpcsync.cli import explain as explanations

    sys.exit(explanations.main(run, as_json=as_json, simulated=simulated, paradigms=paradigms or ()))


@app.command("export")
def export_(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            parser=out_path,
            metavar="FILE",
            help="The file: .pftrace or .csv; for parquet a folder.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="perfetto|csv|parquet",
            help="Format; by default from the suffix of FILE.",
            show_default=False,
        ),
    ] = None,
    from_s: Annotated[
        float | None, typer.Option("--from", metavar="S", help="Begin at this second.", show_default=False)
    ] = None,
    to_s: Annotated[
        float | None, typer.Option("--to", metavar="S", help="End at this second.", show_default=False)
    ] = None,
) -> None:
    """Write runs for Perfetto, as CSV for Pipit, or as Parquet.

    A file for Perfetto may hold several runs. Needs pandas, perfetto and pyarrow: pip install 'hpcsync[export]'.
    """
    from hpcsync.cli import export

    sys.exit(export.main(runs, out, kind, from_s, to_s))


@app.command(help=ABOUT_FIGURES)
def figure(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the figure.", show_default=False)] = None,
    runs: Annotated[list[Path] | None, RUNS] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            parser=out_path,
            metavar="FILE",
            help="Output file: .png, .svg, .pdf or .csv; without a suffix PNG, SVG and CSV. Default: figures/NAME.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Show at most N evenly spaced workers of a run.", show_default=False),
    ] = None,
    from_s: Annotated[
        float | None, typer.Option("--from", metavar="S", help="timeline: begin at this second.", show_default=False)
    ] = None,
    to_s: Annotated[
        float | None, typer.Option("--to", metavar="S", help="timeline: end at this second.", show_default=False)
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(
            metavar="INCHES",
            help="Width of the figure: 3.5 for one column of a paper, 3 at least. Default: 7.",
            show_default=False,
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the figures, one per line.")] = False,
) -> None:
    """Draw a figure, or list the figures."""
    from hpcsync.cli import figure as drawing

    if list_only:
        print(*drawing.LINES, sep="\n")
    else:
        drawing.main(name, runs or [], out, workers, from_s, to_s, width)


@app.command()
def cite(trace: TracePath) -> None:
    """Print BibTeX of the papers behind a run, and of hpcsync."""
    from hpcsync.cli import cite as citing

    citing.main(trace)


@app.command()
def doctor() -> None:
    """Examine this machine: packages, MPI, GPUs, memory."""
    from hpcsync.cli import doctor as examination

    sys.exit(examination.main())


@app.command()
def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="What to measure; everything by default.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Device of the tensors; cuda has fewer targets.")
    ] = "cpu",
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write every repetition to this file.", show_default=False),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with earlier results, written by --json.", show_default=False),
    ] = None,
) -> None:
    """Measure each primitive, compared with the limit of the machine."""
    from hpcsync import bench as benchmark

    sys.exit(benchmark.main(targets or [], json, device, compare))


@app.command(cls=JobCommand)
def slurm(
    job: JobPath,
    nodes: Annotated[list[int], typer.Option(metavar="N", help="Number of nodes.")],
    ntasks_per_node: Annotated[list[int], typer.Option(metavar="M", help="Ranks per node.")],
    cpus_per_task: Annotated[list[int], typer.Option(metavar="C", help="Cores and threads per rank.")] = [1],  # noqa: B006
    gpus_per_node: Annotated[
        list[int] | None, typer.Option(metavar="G", help="GPUs per node.", show_default=False)
    ] = None,
    partition: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Partition.", show_default=False)] = None,
    mem: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Memory per node, such as 16G.", show_default=False)
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time limit: minutes, hours:minutes:seconds or days-hours:minutes.",
            show_default=False,
        ),
    ] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Account to charge.", show_default=False)] = None,
    array: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=[VALUE, ...]",
            help="Job array: one run per value; with several keys, one run per combination.",
        ),
    ] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible", help="Save a checkpoint on SIGTERM, requeue the job and resume it.")
    ] = False,
    mpi: Annotated[
        str | None, typer.Option(metavar="KIND", help="srun's --mpi; by default what this Python's MPI needs.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print a batch script that trains this job under Slurm. Nothing is submitted.

    For a heterogeneous job, give the options about nodes several times: once for each kind of node.
    """
    from hpcsync.cli import slurm as scripts

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
    help="Predict what a training layout would cost on another cluster.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(plan, name="plan")


@plan.command()
def stanza(
    model: Annotated[str, typer.Option(metavar="NAME", help="Architecture of torchvision, such as vgg16.")],
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of nodes, at least 2.")],
    bandwidth_gbit: Annotated[
        float, typer.Option(metavar="B", help="Bandwidth of each node's link in each direction, in Gbit/s.")
    ],
    batch: Annotated[int, typer.Option(metavar="b", help="Batch size of a worker, in samples.")],
    latency_us: Annotated[float, typer.Option(metavar="L", help="Latency of a message, in microseconds.")] = 50.0,
    micro_batches: Annotated[int, typer.Option(metavar="M", help="Pieces of a batch that overlap.")] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Times of a batch (TOML): conv_forward_ms, conv_backward_ms, fc_ms, and optionally fc_fixed_ms.",
            show_default=False,
        ),
    ] = None,
    samples_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Samples per second of one node with the whole model; without it and --profile, measured here.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write all numbers to this file.", show_default=False)
    ] = None,
) -> None:
    """Plan layer separation (Stanza).

    The plan gives the best number of nodes for the fully-connected layers, and compares it with parameter servers and
    all-reduce.
    """
    from hpcsync.cli import plan as plans

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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    garbage.freeze_at_end()
    standard_output.prepare()
    output = contextlib.nullcontext() if under_launcher() else standard_output.may_fail()
    with output, user_errors_in_one_line():  # Ctrl-C while the commands are set up
        app(prog_name="hpcsync")
