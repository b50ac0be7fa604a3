"""Advice on a paradigm: which of the candidates that were tried is the fastest, how sure that is, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcsync.report.summary import Summary
from hpcsync.report.variants import LEAST_SEEDS, Row, Variants
from hpcsync.report.wording import rounded

MARGIN = 0.05  # of the fastest one's time: what a simpler candidate may cost
TIMED = ("to the target", "time (s)", "behind (s)", "fastest")  # title and columns of a table
UNTIMED = ("by loss", "arrived", "loss")
BY_TIME = (
    "behind: seconds after the fastest, paired by seed; fastest: probability of being the fastest; "
    "*: not distinguishable from the fastest"
)
BY_LOSS = "arrived: runs that reached the target; loss: at the end"
FACTOR = "lr x: factor of the job's learning rate"


class Trial(NamedTuple):
    """Trial that has ended.

    Attributes
    ----------
    number
        Its number; the first is 1.
    share
        Share of its virtual time in that of the last trial.
    limit_s
        Virtual time of the last trial.
    n_seeds
        Number of its seeds.
    """

    number: int
    share: float
    limit_s: float
    n_seeds: int


class Advice(NamedTuple):
    """What came of trying candidates.

    Attributes
    ----------
    advised
        Label of the advised candidate; None if none has reached the target.
    alike
        Labels of candidates that cannot be told from the fastest, in the order of the candidates, which is from simple
        to intricate. `advised` is one of them, see `simplest`.
    ranking
        Rows of the last trial, the fastest first; those without a time by arrivals, then by loss.
    """

    advised: str | None
    alike: tuple[str, ...]
    ranking: tuple[Row, ...]


def conclude(found: Variants, order: Sequence[str]) -> Advice:
    """Return the advice that follows from a comparison.

    A candidate cannot be told from the fastest if the interval of their difference, paired by seed, contains 0; nor
    without an interval. The probability of being the fastest does not count: of few seeds it is often 0 for equals.

    Parameters
    ----------
    found
        Comparison of the last trial.
    order
        Labels from simple to intricate.
    """
    ranking = sorted(found.rows, key=lambda row: (row.label != found.fastest, *_place(row)))
    if found.fastest is None:
        return Advice(None, (), tuple(ranking))
    alike = {found.fastest}
    for row in ranking:
        behind = row.behind_s
        if behind is not None and (behind.half_width is None or behind.mean <= behind.half_width):
            alike.add(row.label)
    ordered = tuple(label for label in order if label in alike)
    means = {row.label: row.time_s.mean for row in ranking if row.time_s is not None}
    return Advice(simplest(ordered, means), ordered, tuple(ranking))


def _place(row: Row) -> tuple[float, int, float]:
    loss = math.inf if row.loss is None or math.isnan(row.loss) else row.loss
    return math.inf if row.time_s is None else row.time_s.mean, -row.arrived, loss


def simplest(alike: Sequence[str], means: Mapping[str, float]) -> str:
    """Return the first of some candidates whose mean time is near that of the fastest of them.

    A few seeds may not tell candidates apart that take twice as long: to be indistinguishable is no reason to advise
    the slower one, only to be about as fast is.

    Parameters
    ----------
    alike
        Labels from simple to intricate.
    means
        Mean times to the target by label.
    """
    limit_s = (1 + MARGIN) * min(means[label] for label in alike)
    return next(label for label in alike if means[label] <= limit_s)


def prediction(runs: Iterable[Summary]) -> dict[str, float]:
    """Return the `[predicted]` of a job file from runs that reached the target; empty if one of them did not.

    The interval is that in which one further run should lie with a probability of 80 %, by Student's distribution.

    Parameters
    ----------
    runs
        Summaries of the runs.
    """
    from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes a second to import

    runs = list(runs)
    times = [run.time_to_target_s for run in runs if run.time_to_target_s is not None]
    if not times or len(times) < len(runs):
        return {}
    mean = sum(times) / len(times)
    found = {"seconds": mean}
    if len(times) > 1:
        spread = math.sqrt(sum((time - mean) ** 2 for time in times) / (len(times) - 1) * (1 + 1 / len(times)))
        half = spread * float(stdtrit(len(times) - 1, 0.9))
        found |= {"low_s": max(0.0, mean - half), "high_s": mean + half}
    speeds = [run.samples_per_s for run in runs if run.samples_per_s]
    return found | ({"samples_per_s": sum(speeds) / len(speeds)} if speeds else {})


def coarseness(predicted: Mapping[str, float], every_samples: int) -> str:
    """Say that evaluations are further apart than a predicted interval is wide; empty if they are not.

    Parameters
    ----------
    predicted
        What `prediction` returns.
    every_samples
        Samples between two evaluations.
    """
    if "low_s" not in predicted or "samples_per_s" not in predicted:
        return ""
    apart_s = every_samples / predicted["samples_per_s"]
    if predicted["high_s"] - predicted["low_s"] >= apart_s:
        return ""
    return (
        f"This interval is narrower than the time between two evaluations ({rounded(apart_s)} s), so it understates "
        "the uncertainty."
    )


def trial_numbers(runs: Mapping[int, Summary]) -> dict[str, Any]:
    """Return what the runs of one candidate did in one trial: means over its seeds, for JSON.

    Parameters
    ----------
    runs
        Summaries by seed.
    """
    times = [run.time_to_target_s for run in runs.values() if run.time_to_target_s is not None]
    losses = [run.final_loss for run in runs.values() if run.final_loss is not None]
    return {
        "seeds": list(runs),
        "arrived": len(times),
        "time_s": sum(times) / len(times) if len(times) == len(runs) else None,
        "loss": sum(losses) / len(losses) if len(losses) == len(runs) else None,
        "predicted": prediction(runs.values()),
    }


def verdict(advice: Advice, target: str | None, trial: Trial) -> list[str]:
    """Return sentences that say what is advised, if anything.

    Parameters
    ----------
    advice
        The advice.
    target
        Target of the job in words.
    trial
        Trial from which the advice follows: the last one, or one before in which the budget was spent.
    """
    target, percent = target or "the target", 100 * trial.share
    if advice.advised is None and trial.share == 1:
        return [f"No candidate reached {target} with every seed, so none is advised."]
    if advice.advised is None:
        return [
            f"Too early for advice: in trial {trial.number}, with {percent:.0f} % of the time, no candidate reached "
            f"{target}{' with every seed' * (trial.n_seeds > 1)}.",
            f"The ranking is provisional: by the loss after {trial.share * trial.limit_s:.3g} of {trial.limit_s:.3g} "
            "virtual s.",
        ]
    lines = [f"Train with {advice.advised}."]
    fastest = advice.ranking[0].label  # beside which the others are
    if others := [label for label in advice.alike if label != fastest]:
        few = f" ({_seeds(trial.n_seeds)} no interval, {LEAST_SEEDS} would)" * (trial.n_seeds < LEAST_SEEDS)
        which = "it" if fastest == advice.advised else f"the fastest, {fastest}"
        lines.append(f"Not distinguishable from {which}: {', '.join(others)}{few}.")
    if trial.share < 1:
        lines.append(
            f"This is from trial {trial.number}, with {percent:.0f} % of the time; the learning rates were "
            "selected with one of its seeds."
        )
    return lines


def by_loss(trials: Sequence[Mapping[str, Any]], n_last: int) -> str:
    """Say that the loss alone left out candidates; empty if none was left out, or one reached the target before.

    Parameters
    ----------
    trials
        The trials before the last: `limit_s`, and of each of the `candidates` the number of runs that `arrived`.
    n_last
        Number of candidates of the last trial.
    """
    rows = [row for trial in trials for row in trial["candidates"]]
    if len({row["label"] for row in rows}) <= n_last or any(row["arrived"] for row in rows):
        return ""
    after = " and ".join(f"{trial['limit_s']:.3g}" for trial in trials)
    return (
        "No candidate reached the target before the last trial, so its candidates were selected by their loss after "
        f"{after} virtual s, and a better one may have been left out. A larger limit in [stop] makes the trials longer."
    )


def _seeds(n: int) -> str:
    return "1 seed gives" if n == 1 else f"{n} seeds give"


def why(advised: Mapping[int, Summary], reference: Mapping[int, Summary], name: str) -> str:
    """Return one sentence: how many samples a second it trains, and how many it needs, beside a reference.

    Parameters
    ----------
    advised, reference
        Summaries by seed. Seeds that both have, and at which both reached the target, count.
    name
        Label of the reference.
    """
    speeds, needs = [], []
    for seed in advised.keys() & reference.keys():
        a, b = advised[seed], reference[seed]
        if None in (a.time_to_target_s, b.time_to_target_s, a.samples_per_s, b.samples_per_s):
            continue
        assert a.time_to_target_s and b.time_to_target_s and a.samples_per_s and b.samples_per_s
        speeds.append(a.samples_per_s / b.samples_per_s)
        needs.append(a.time_to_target_s / b.time_to_target_s * speeds[-1])
    if not speeds:
        return f"{name} did not reach the target, so there is nothing to compare with."
    speed, need = (sum(ratios) / len(ratios) for ratios in (speeds, needs))
    return (
        f"Compared with {name}, it trains {speed:.2f} times as many samples per second and needs {need:.2f} times as "
        "many samples to reach the target."
    )


def table(advice: Advice, factors: Mapping[str, float]) -> RenderableType:
    """Return the ranking as a table with a legend, by time, or by loss if no candidate has a time.

    Parameters
    ----------
    advice
        The advice.
    factors
        Factor of the job's learning rate that each candidate trained with, by label.
    """
    timed = any(row.time_s for row in advice.ranking)
    title, *columns = TIMED if timed else UNTIMED
    shown = Table(box=None, pad_edge=False, title=title, title_justify="left")
    shown.add_column("candidate")
    for column in (*columns, "samples/s", "lr x"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in advice.ranking:
        arrived = f"{row.arrived} of {row.runs}"
        if timed:
            chance = "" if row.fastest is None else f"{100 * row.fastest:.0f} %"
            cells = [_words(row.time_s) if row.time_s else arrived, _words(row.behind_s), chance]
        else:
            cells = [arrived, "" if row.loss is None else f"{row.loss:.4g}"]
        shown.add_row(
            row.label + " *" * (row.label in advice.alike),
            *cells,
            "" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
            f"{factors[row.label]:g}",
        )
    return Group(shown, Text(f"{BY_TIME if timed else BY_LOSS}; {FACTOR}", "dim"))


def _words(value: Any) -> str:
    if value is None:
        return ""
    return rounded(value.mean) + ("" if value.half_width is None else f" ± {rounded(value.half_width, 2)}")


def numbers(advice: Advice) -> list[dict[str, Any]]:
    """Return the ranking for JSON."""
    return [
        {
            **row._asdict(),
            "time_s": None if row.time_s is None else row.time_s._asdict(),
            "behind_s": None if row.behind_s is None else row.behind_s._asdict(),
        }
        for row in advice.ranking
    ]
