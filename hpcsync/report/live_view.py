"""The status of a run as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcsync.report.between import PARTS
from hpcsync.report.live import Decision, Status, Workers
from hpcsync.report.wording import hours, plural

OLD_S, OLD = 10.0, 3  # seconds, and intervals, after which a status of a running run is said to be old
LOAD_SHOWN = 0.01  # share of a worker's time from which on loading has a column
WIDE = 66  # columns of a terminal that all columns of the table but the hosts take
LEAST_OF_HOST = 8  # columns for the names of hosts, or there are none
TROUBLE = ("died", "stalled", "left")  # states whose workers come first
DECISIONS = {  # of controllers, in words
    "batches": "worker {worker} takes batches of {chosen}",
    "commits": "{chosen} commits of each worker in a period",
    "k": "each update uses {chosen} contributions",
    "local-steps": "worker {worker} makes {chosen} local steps per push",
    "ratio": "worker {worker} sends {chosen} of the elements of a push",
    "reward": "{chosen} commits of each worker in a period were tried",
    "share": "worker {worker} takes {chosen} of the data",
    "stage": "stage {chosen} begins",
    "switch": "switched after {chosen} samples",
}
STYLES = {"died": "bold red", "stalled": "bold yellow", "left": "dim", "computing": "green", "waiting": "yellow"}


def render(status: Status, age_s: float, console: Console, height: int) -> RenderableType:
    """Return the view of a status.

    Parameters
    ----------
    status
        The status.
    age_s
        Seconds since it was written.
    console
        Console to print to.
    height
        Lines that may be used. Workers that do not fit are folded into one line.
    """
    width = console.width
    above = [_title(status, age_s), *_progress(status, width), *_not_finite(status)]
    below = [*_decisions(status), *_stalls(status), Text(status.bound, "dim")]
    n_lines = sum(len(line.wrap(console, width)) if isinstance(line, Text) else 1 for line in (*above, *below))
    room = max(1, height - n_lines - 3)  # heading of the table, line of the folded, prompt
    return Group(*above, *_workers(status.workers, room, width, served=status.n_servers > 0), *below)


def order(workers: Workers) -> list[int]:
    """Return the workers in the order in which they matter: those in trouble, then the slowest first."""
    rank = {state: place for place, state in enumerate(TROUBLE)}
    keys = zip(workers.state, workers.iteration, strict=True)
    return [w for *_, w in sorted((rank.get(state, len(TROUBLE)), n, w) for w, (state, n) in enumerate(keys))]


def _title(status: Status, age_s: float) -> Text:
    servers = f"{status.n_servers} server{'s' * (status.n_servers != 1)}, " if status.n_servers else ""
    n_workers = len(status.workers.state)
    title = Text.assemble(
        (status.name, "bold"),
        f"  {status.paradigm}, {servers}{n_workers} worker{'s' * (n_workers != 1)}  ",
        (status.status, {"running": "green", "finished": "green"}.get(status.status, "bold red")),
        f"  {status.now_s:,.1f} s",
    )
    if status.status == "running" and age_s > max(OLD_S, OLD * status.every_s):
        title.append(f"  no status update for {age_s:,.0f} s: rank 0 hangs, has died or cannot write", "bold red")
    return title


def _progress(status: Status, width: int) -> list[RenderableType]:
    parts = []
    if status.share is not None:
        parts.append(f"{100 * status.share:.0f} %")
    if status.samples_per_s is not None:
        parts.append(f"{status.samples_per_s:,.0f} samples/s")
    if status.status == "running" and status.left_s is not None:
        mean, least, most = status.left_s
        parts.append(f"{hours(mean)} left ({hours(least)} to {hours(most)})")
    speed = "  ".join(parts)
    row: RenderableType = Text(speed)
    if status.share is not None and width - len(speed) > 12:
        row = Table.grid(padding=(0, 2))
        row.add_row(ProgressBar(1.0, status.share, width=min(30, width - len(speed) - 3)), speed)
    counts = [plural(status.samples, "sample"), plural(status.updates, "update")]
    if status.loss is not None:
        counts.append(f"loss {status.loss:.4g}")
    if status.accuracy is not None:
        counts.append(f"accuracy {status.accuracy:.4f}")
    if status.target is not None:
        target = status.target
        if status.accuracy is not None:
            target = target.removeprefix("accuracy ")
        elif status.loss is not None:  # the training loss of an iteration
            target += " at an evaluation"
        counts[-1] += f" (target {target})"
    return [row, Text("  ".join(counts))]


def _not_finite(status: Status) -> list[Text]:
    """Return a line that says since when the run has diverged, if it has."""
    if not status.not_finite:
        return []
    first, n, n_workers = status.not_finite[0], len(status.not_finite), len(status.workers.state)
    who = f"worker {first.worker}" if n == 1 else f"{n} of {n_workers} workers, first worker {first.worker}"
    return [Text(f"diverged: {first.what} not finite since iteration {first.iteration:,} ({who})", "bold red")]


def _workers(workers: Workers, room: int, width: int, *, served: bool) -> list[RenderableType]:
    ordered = order(workers)
    shown = ordered if len(ordered) <= room + 1 else ordered[:room]
    room_of_host = width - WIDE
    hosts = len(set(workers.host)) > 1 and room_of_host >= LEAST_OF_HOST
    served = served and width >= WIDE
    loads = any((share or 0) >= LOAD_SHOWN for share in workers.load)
    parts = [part for part in PARTS if part != "load" or loads] if width >= WIDE else ["wait"]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("worker", *(["host"] if hosts else []), "state"):
        table.add_column(name, no_wrap=True, max_width=room_of_host if name == "host" else None)
    for name in ("iteration", "lead", *(["staleness"] if served else []), *parts):
        table.add_column(name, justify="right", no_wrap=True)
    for w in shown:
        state = workers.state[w]
        row: list[str | Text] = [
            str(w),
            *([Text(workers.host[w])] if hosts else []),
            Text(state, STYLES.get(state, "")),
        ]
        lead = workers.lead[w]
        row += [f"{workers.iteration[w]:,}", "" if lead is None else str(lead)]
        row += [_number(workers.staleness[w])] if served else []
        table.add_row(*row, *(_percent(getattr(workers, part)[w]) for part in parts))
    folded = ordered[len(shown) :]
    return [table, Text(_folded(workers, folded), "dim", overflow="ellipsis", no_wrap=True)] if folded else [table]


def _folded(workers: Workers, folded: Sequence[int]) -> str:
    """Return what the workers that are not shown have in common, in a line."""
    iterations = [workers.iteration[w] for w in folded]
    waits = [wait for w in folded if (wait := workers.wait[w]) is not None]
    line = f"and {len(folded):,} faster workers: iteration {min(iterations):,} to {max(iterations):,}"
    line += f", lead up to {max(workers.lead[w] or 0 for w in folded)}"
    return f"{line}, wait {_percent(min(waits))} to {_percent(max(waits))}" if waits else line


def _decisions(status: Status) -> list[Text]:
    return [Text(f"{d.controller} at {d.now_s:.1f} s: {_in_words(d)}") for d in status.decisions]


def _in_words(d: Decision) -> str:
    """Return a decision in words; its inputs are in the trace and in `hpcsync watch --json`."""
    if d.controller == "dssp":
        gap_iters = d.inputs.get("gap_iters")
        ahead = "" if gap_iters is None else f", {_iterations(gap_iters)} ahead,"
        return f"worker {d.worker}{ahead} " + (f"gets credits for {_iterations(d.chosen)}" if d.chosen else "waits")
    chosen = "?" if d.chosen is None else f"{d.chosen:,.0f}" if d.chosen == round(d.chosen) else f"{d.chosen:.4g}"
    return DECISIONS.get(d.controller, "{chosen} for worker {worker}").format(chosen=chosen, worker=d.worker)


def _iterations(n: float) -> str:
    return f"{n:.0f} iteration{'s' * (n != 1)}"


def _stalls(status: Status) -> list[Text]:
    return [
        Text(
            f"worker {stall.worker} stalled at {stall.now_s:.1f} s ({stall.phase}): iteration {stall.iteration} had "
            f"lasted {stall.lasted_s:.1f} s",
            "yellow",
        )
        for stall in status.stalls
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"
