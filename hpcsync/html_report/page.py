"""The page: what the template `page.html` shows, from the runs of each variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hpcsync.html_report import charts, curves, verdict
from hpcsync.html_report.charts import Figure
from hpcsync.html_report.run_data import RunData, evenly, runs_with
from hpcsync.html_report.svg import number
from hpcsync.report import variants
from hpcsync.report.citations import bibtex, references, software
from hpcsync.report.summary import beside_prediction
from hpcsync.report.variants import Variants
from hpcsync.trace.schema import Change, Phase

PREDICTED = 10  # runs whose predictions are named
SHOWN = 8  # variants in figures, and with a figure of their own
CONDITIONS = 6  # with figures
ROWS = 300  # of a table of numbers, evenly spaced
VERSIONS = (
    "hpcsync_version",
    "git_commit",
    "python_version",
    "torch_version",
    "numpy_version",
    "h5py_version",
    "mpi_library",
    "hosts",
    "created",
)


class Group(NamedTuple):
    """Variants under one condition.

    Attributes
    ----------
    runs
        The runs of each variant, by its label.
    shown
        Those of the variants in figures.
    """

    result: Variants
    runs: dict[str, list[RunData]]
    shown: dict[str, list[RunData]]


def render(found: Mapping[str, Mapping[str, Sequence[RunData]]]) -> str:
    """Return the page.

    Parameters
    ----------
    found
        Runs by condition and label of the variant; at least one.
    """
    groups = [_group(condition, each) for condition, each in found.items()]
    runs = [run for group in groups for each in group.runs.values() for run in each]
    names = list(dict.fromkeys(run.summary.name for run in runs))
    template = _environment().get_template("page.html")
    return template.render(
        style=Markup(Path(__file__).with_name("style.css").read_text(encoding="utf-8")),
        title=names[0] if len(names) == 1 else f"{len(names)} jobs",
        facts=_facts(groups, runs),
        verdicts=[(group.result.condition, verdict.of_variants(group.result, group.runs)) for group in groups],
        comparison=[(group.result.condition, _comparison(group.result)) for group in groups if len(group.runs) > 1],
        remarks=list(dict.fromkeys(line for group in groups for line in group.result.remarks)),
        run_table=_run_table(groups),
        sections=_sections(groups),
        audits=_audits(runs),
        jobs=[(_where(g, label), each[0].job.to_toml()) for g in groups for label, each in g.runs.items()],
        # The reader of traces escapes line ends, which MPICH's version has.
        versions=[(name, [text.replace(r"\n", "; ") for text in runs_with(runs, name)]) for name in VERSIONS],
        citations=_citations(runs),
        thinned=_thinned,
    )


def _environment() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _group(condition: str, runs: Mapping[str, Sequence[RunData]]) -> Group:
    by_label = {label: sorted(each, key=lambda run: run.job.seed) for label, each in runs.items()}
    result = variants.compare(
        {label: {run.job.seed: run.summary for run in each} for label, each in by_label.items()}, condition
    )
    soonest = sorted(result.rows, key=lambda row: row.time_s.mean if row.time_s else float("inf"))[:SHOWN]
    shown = {row.label: by_label[row.label] for row in result.rows if row in soonest}
    return Group(result, by_label, shown)


def _where(group: Group, label: str) -> str:
    return f"{label}, {group.result.condition}" if group.result.condition else label


# ---- facts and tables ----


def _facts(groups: Sequence[Group], runs: Sequence[RunData]) -> list[tuple[str, str]]:
    workers = sorted({run.summary.n_workers for run in runs})
    engines = {"simulator": "virtual time", "mpi": "MPI ranks", "ddp": "DistributedDataParallel"}
    first = groups[0].result
    facts = [("runs", f"{len(runs):,}"), ("variants", f"{sum(len(group.runs) for group in groups):,}")]
    facts += [("seeds", f"{len({run.job.seed for run in runs}):,}")]
    facts += [("workers", f"{workers[0]:,}" if len(workers) == 1 else f"{workers[0]:,} to {workers[-1]:,}")]
    facts += [("engine", " and ".join(engines.get(word, word) for word in runs_with(runs, "engine")))]
    if len(groups) == 1 and first.target:
        facts.append(("target", first.target))
    named = [(_where(group, label), run) for group in groups for label, each in group.runs.items() for run in each]
    of_variant = len({where for where, _ in named}) > 1
    facts += [
        (f"predicted, {where}, seed {run.job.seed}" if of_variant else f"predicted, seed {run.job.seed}", said)
        for where, run in named[:PREDICTED]
        if (said := beside_prediction(run.summary))
    ]
    passed = [all(check.passed for check in run.checks) for run in runs if run.checks is not None]
    facts.append(("audits passed", f"{sum(passed):,} of {len(passed):,}" if passed else "none made"))
    return facts


class Grid(NamedTuple):
    """A table of the page, and what it leaves out."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def _comparison(result: Variants) -> Grid:
    names = variants.column_names([result])
    return Grid(("variant", *names), [tuple(variants.row_cells(row, result, names[-1])) for row in result.rows])


def _thinned(table: charts.Table) -> Grid:
    rows = evenly(table.rows, ROWS)
    note = f"{len(rows):,} evenly spaced of {len(table.rows):,} rows." if len(rows) < len(table.rows) else ""
    return Grid(table.columns, rows, note)


def _run_table(groups: Sequence[Group]) -> Grid:
    columns = (
        "variant",
        "seed",
        "status",
        "engine",
        "servers",
        "workers",
        "time (s)",
        "updates",
        "samples",
        "samples/s",
    )
    more = ("to target (s)", "accuracy", "loss", "MB moved", "folder")
    rows = []
    for group in groups:
        for label, each in group.runs.items():
            for run in each:
                s = run.summary
                known = [s.samples_per_s, s.time_to_target_s, s.final_accuracy, s.final_loss]
                rows.append(
                    (
                        _where(group, label),
                        str(run.job.seed),
                        s.status,
                        str(s.engine or "-"),
                        str(s.n_servers or "-"),
                        f"{s.n_workers:,}",
                        number(round(s.duration_s, 3)),
                        f"{s.updates:,}",
                        f"{s.samples:,}",
                        *("-" if value is None else number(value) for value in known),
                        number(1e-6 * s.wire_bytes),
                        str(_place(run)),
                    )
                )
    return Grid(columns + more, rows)


def _place(run: RunData) -> Path:
    return run.path.parent if run.path.name == "trace.h5" else run.path


def _audits(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        checks = run.checks or ()
        failed = [check for check in checks if not check.passed]
        if run.checks is None:
            result = "not audited here: hpcsync report --audit audits every run"
        else:
            result = f"{len(failed)} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
        name = f"{run.job.paradigm.label}, seed {run.job.seed}: {_place(run)}"
        kind = "note" if run.checks is None else "bad" if failed else "good"
        found.append({"name": name, "result": result, "verdict": kind, "checks": checks})
    return found


def _citations(runs: Sequence[RunData]) -> str:
    entries: dict[str, str] = {}
    for run in runs:
        for papers in references(run.job).values():
            entries |= {paper.key: bibtex(paper) for paper in papers}
    entries |= {bibtex(software(run.attributes)): bibtex(software(run.attributes)) for run in runs}
    return "\n\n".join(entries.values())


# ---- sections of figures ----


class Section(NamedTuple):
    """A part of the page with a heading; figures by condition."""

    key: str
    heading: str
    lead: str
    figures: list[tuple[str, list[Figure]]]
    tables: list[tuple[str, Grid]]


_FIGURES: tuple[tuple[str, str, str, Callable[[Group], Iterator[Figure | None]]], ...] = (
    (
        "target",
        "Time to the target",
        "A run that ended before it reached the target has no time: it is counted, and its variant has no mean.",
        lambda group: _times(group),
    ),
    (
        "accuracy",
        "Accuracy and loss",
        "",
        lambda group: (curves.learning_curves(group.shown, quantity) for quantity in ("accuracy", "loss")),
    ),
    (
        "time",
        "Where the workers' time went",
        "A worker waits where it could have computed.",
        lambda group: _worker_time(group),
    ),
    (
        "waiting",
        "Who waited for whom",
        "",
        lambda group: iter([charts.waiting_matrices(group.shown)]),
    ),
    (
        "staleness",
        "Staleness and lead",
        "Staleness counts the updates between the weights that a gradient was computed from and its own update. "
        "Lead counts the iterations by which a worker is ahead of the slowest one.",
        lambda group: (charts.histograms(group.shown, what) for what in ("staleness", "leads")),
    ),
    (
        "decisions",
        "Decisions of the controllers",
        "What hpcsync chose during the run.",
        lambda group: (
            charts.decisions(label, each[0], name)
            for label, each in group.shown.items()
            for name in charts.decided(each[0])
        ),
    ),
)


def _sections(groups: Sequence[Group]) -> list[Section]:
    found = []
    for key, heading, lead, of_group in _FIGURES:
        figures = [
            (group.result.condition, [_with_left_out(group, each) for each in of_group(group) if each is not None])
            for group in groups[:CONDITIONS]
        ]
        if len(groups) > CONDITIONS:
            lead = f"{lead} Figures of the first {CONDITIONS} of {len(groups)} conditions."
        found.append(Section(key, heading, lead, [each for each in figures if each[1]], []))
    events = Section("events", "Stalls, deaths and changes of membership", "", [], list(_events(groups)))
    return [section for section in [*found, events] if section.figures or section.tables]


def _with_left_out(group: Group, figure: Figure) -> Figure:
    """Return the figure with the number of variants that it leaves out."""
    if len(group.runs) == len(group.shown):
        return figure
    n = len(group.shown)
    shown = f"first {n}" if group.result.fastest is None else f"{n} soonest"
    note = f"The {shown} of {len(group.runs)} variants are shown."
    return figure._replace(note=f"{figure.note} {note}".strip())


def _times(group: Group) -> Iterator[Figure]:
    times = {label: [variants.time_s(run.summary) for run in each] for label, each in group.shown.items()}
    has_arrived = any(math.isfinite(time_s) for each in times.values() for time_s in each)
    if group.result.target is not None and has_arrived and sum(map(len, group.runs.values())) > 1:
        yield charts.times_to_target(times, {row.label: row.time_s for row in group.result.rows}, group.result.target)


def _worker_time(group: Group) -> Iterator[Figure]:
    if len(group.shown) > 1:
        yield charts.time_of_variants(group.shown)
    yield charts.time_of_workers(group.shown)


def _events(groups: Sequence[Group]) -> Iterator[tuple[str, Grid]]:
    stalls, changes, n_stalls = [], [], 0
    for group in groups:
        for label, each in group.runs.items():
            for run in each:
                who = f"{_where(group, label)}, seed {run.job.seed}"
                n_stalls += run.n_stalls
                stalls += [
                    (
                        who,
                        number(round(float(row["now_s"]), 3)),
                        str(row["worker"]),
                        f"{row['iteration']:,}",
                        Phase(row["phase"]).name.lower(),
                        number(round(float(row["lasted_s"]), 3)),
                        number(round(float(row["deadline_s"]), 3)),
                        str(row["n_waiting"]),
                    )
                    for row in run.stalls
                ]
                leaving = {event.worker for event in run.job.cluster.events if event.change == "leave"}
                changes += [
                    (who, number(round(float(row["now_s"]), 3)), str(row["worker"]), Change(row["change"]).name.lower())
                    for row in run.membership
                    if row["change"] != Change.LEFT or int(row["worker"]) in leaving
                ]
    for name, columns, rows, n in (
        ("Deaths, leaves and joins", ("run", "time (s)", "worker", "change"), changes, len(changes)),
        (
            "Stalls",
            ("run", "time (s)", "worker", "iteration", "phase", "lasted (s)", "expected (s)", "others waiting"),
            stalls,
            n_stalls,
        ),
    ):
        kept = evenly(rows, ROWS)
        note = f"{len(kept):,} of {n:,} rows." if len(kept) < n else ""
        if kept:
            yield name, Grid(columns, kept, note)
