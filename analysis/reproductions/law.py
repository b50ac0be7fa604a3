"""Does one law give the gradients to a target? N = a (d + phi / b), with d = m or 1 + kappa sqrt(tau_max tau_mean).

N is the number of applied gradients up to the target, b the batch of each, m the number of gradients in an update,
tau the staleness of a gradient, phi the gradient noise scale in samples (McCandlish et al. 2018, arXiv:1812.06162,
appendix A.1). `a` and `kappa` are fitted for each momentum; phi is measured, by the norms in the traces of BSP.

That a delay acts like a batch follows from the bounds of Koloskova et al. (2022), arXiv:2206.08307.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator
from rich.console import Console
from scipy import stats
from scipy.optimize import minimize

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.trace.reader import Trace, load
from hpcsync.trace.schema import Outcome
from reproductions.claims import Claim, conclude, ratio
from reproductions.simulating import simulate_all

TARGET = 0.95  # accuracy
WORKERS, BATCHES, MOMENTA = (4, 8), (8, 32), (0.0, 0.9)
RATES = {0.0: 0.4, 0.9: 0.04}  # of the digits, by momentum
FACTORS = (0.5, 1.0, 2.0)  # of the rate; two further ones where the best is at an end
TUNING_SEED, FIRST_SEED = 1, 11
SAMPLES = 60_000  # at most
METHODS: dict[str, dict[str, Any]] = {
    "BSP": {"name": "bsp"},
    "k-sync": {"name": "k-sync"},  # with half of the workers
    "SSP 3": {"name": "ssp", "staleness": 3},
    "DSSP": {"name": "dssp", "staleness_min": 3, "staleness_max": 15},
    "ASP": {"name": "asp"},
}
SYNCHRONOUS, ASYNCHRONOUS = ("BSP", "k-sync"), ("SSP 3", "DSSP", "ASP")
KAPPA = {0.0: 0.70, 0.9: 1.57}  # what this script has found, by momentum
COLOURS = {method: plotting.PARADIGM_COLOURS[str(table["name"])] for method, table in METHODS.items()}


class Setting(NamedTuple):
    """Workers, batch of each, and momentum."""

    workers: int
    batch: int
    momentum: float

    def __str__(self) -> str:
        return f"{self.workers}x{self.batch}-{self.momentum:g}"


def settings() -> list[Setting]:
    return [Setting(*each) for each in itertools.product(WORKERS, BATCHES, MOMENTA)]


def job(setting: Setting, method: str, factor: float, seed: int, samples: int = SAMPLES) -> Job:
    """Return the job of one run: equal workers whose times vary by 20 %."""
    paradigm = dict(METHODS[method])
    if method == "k-sync":
        paradigm["k"] = setting.workers // 2
    return Job.from_table(
        {
            "name": "law",
            "seed": seed,
            "workload": {"name": "digits", "batch_size": setting.batch},
            "optimizer": {
                "name": "sgd",
                "lr": factor * RATES[setting.momentum],
                "momentum": setting.momentum,
                "async_lr_scale": "1/workers",
            },
            "stop": {"target_accuracy": TARGET, "samples": samples},
            "evaluation": {"every_samples": 500},
            "paradigm": paradigm,
            "cluster": {
                "workers": setting.workers,
                "compute": {"model": "lognormal", "seconds": 0.02, "jitter": 0.2},
            },
        }
    )


# ---- what is measured ----


def noise(trace: Trace) -> tuple[float, float]:
    """Return the traces of the gradients' covariance and the squares of the mean gradient, summed over all updates.

    Their ratio is phi. Both are unbiased for each update of P > 1 gradients of one version and of batches of b.
    """
    pushes, updates = trace.tables["pushes"], trace.tables["updates"]
    pushes = pushes[pushes["outcome"] == Outcome.APPLIED]
    at = pushes["version_read"] + pushes["staleness"]
    n = np.bincount(at, minlength=len(updates))
    of_each = np.bincount(at, pushes["gradient_sq"], len(updates)) / n
    whole = updates["gradient_sq"]
    covariance = trace.job.workload.batch_size * (of_each - whole) / (1 - 1 / n)
    square = (n * whole - of_each) / (n - 1)
    return float(covariance.sum()), float(square.sum())


def measure(folder: Path, setting: Setting, method: str, factor: float, seed: int) -> dict[str, Any]:
    """Return a run's gradients to the target (NaN: never reached), its updates' size, its delay, and phi of BSP."""
    trace = load(folder)
    evaluations, updates, pushes = (trace.tables[name] for name in ("evaluations", "updates", "pushes"))
    reached = evaluations[evaluations["accuracy"] >= TARGET]
    version = int(reached["version"][0]) if len(reached) else len(updates)
    applied = pushes[pushes["outcome"] == Outcome.APPLIED]
    covariance, square = noise(trace) if method == "BSP" else (np.nan, np.nan)
    synchronous = method in SYNCHRONOUS
    delay = np.sqrt(float(applied["staleness"].max()) * float(applied["staleness"].mean()))
    return {
        **setting._asdict(),
        "method": method,
        "factor": factor,
        "seed": seed,
        "gradients": float(updates["n_contributions"][:version].sum()) if len(reached) else np.nan,
        "size": float(updates["n_contributions"].mean()) if synchronous else 1.0,
        "delay": 0.0 if synchronous else delay,
        "covariance": covariance,
        "square": square,
    }


# ---- the law ----


def predicted(runs: pd.DataFrame, phi: pd.Series | float, a: float, kappa: float) -> pd.Series:
    """Return the gradients to the target that the law gives."""
    return a * (runs["size"] + kappa * runs["delay"] + phi / runs["batch"])


def fit(runs: pd.DataFrame, phi: pd.Series | float) -> tuple[float, float]:
    """Return `a` and `kappa` (at least 0) with the least squares of log(predicted / measured)."""

    def loss(parameters: np.ndarray) -> float:
        ratio = np.log(predicted(runs, phi, 1.0, float(np.exp(parameters[0]))) / runs["gradients"])
        return float(((ratio - ratio.mean()) ** 2).sum())

    found = min((minimize(loss, [begin], method="Nelder-Mead") for begin in (-6.0, -2.0, 0.0)), key=lambda r: r.fun)
    kappa = float(np.exp(found.x[0]))
    return float(np.exp(-np.log(predicted(runs, phi, 1.0, kappa) / runs["gradients"]).mean())), kappa


VARIANTS = {"law": 1.0, "phi = 1": np.nan, "without noise": 0.0}  # factor of the measured phi
CONTROLS = tuple(VARIANTS)[1:]


def fitted(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that arrived, with phi of their setting, and the predictions of the law and of its controls."""
    of_bsp = runs[runs["method"] == "BSP"].groupby(list(Setting._fields))[["covariance", "square"]].sum()
    phi = (of_bsp["covariance"] / of_bsp["square"]).rename("phi").reset_index()
    arrived = runs.dropna(subset=["gradients"]).merge(phi, on=list(Setting._fields))
    for variant, factor in VARIANTS.items():
        for momentum in sorted(arrived["momentum"].unique()):
            rows = arrived[arrived["momentum"] == momentum]
            used: pd.Series | float = 1.0 if np.isnan(factor) else factor * rows["phi"]
            a, kappa = fit(rows, used)
            arrived.loc[rows.index, variant] = predicted(rows, used, a, kappa)
            arrived.loc[rows.index, [f"a, {variant}", f"kappa, {variant}"]] = [a, kappa]
    return arrived


def by_setting(runs: pd.DataFrame, number: Callable[[pd.DataFrame], float]) -> pd.Series:
    """Return a number of each setting."""
    return pd.Series({Setting(*key): number(rows) for key, rows in runs.groupby(list(Setting._fields))}, dtype=float)


def typical(logs: pd.Series) -> float:
    """Return the exponential of the root mean square: a typical factor, of its logarithms."""
    return float(np.exp(np.sqrt((logs**2).mean())))


def error(runs: pd.DataFrame, variant: str) -> pd.Series:
    """Return the typical factor between prediction and measurement in each setting."""
    return by_setting(runs, lambda rows: typical(np.log(rows[variant] / rows["gradients"])))


def error_elsewhere(runs: pd.DataFrame, column: str, known: float) -> pd.Series:
    """Return the typical factor of error where `column` is not `known`, with `a` and `kappa` fitted where it is."""
    here, other = runs[runs[column] == known], runs[runs[column] != known]
    if here.empty or other.empty:
        return pd.Series(dtype=float)
    return error(other.assign(elsewhere=predicted(other, other["phi"], *fit(here, here["phi"]))), "elsewhere")


def scatter(runs: pd.DataFrame) -> pd.Series:
    """Return the typical factor between the gradients of a method's seeds and their mean in logarithms."""
    return by_setting(runs, lambda rows: typical(np.log(rows["gradients"]).groupby(rows["method"]).std()))


def order(runs: pd.DataFrame, variant: str) -> pd.Series:
    """Return Kendall's tau between predicted and measured gradients of the methods in each setting."""

    def tau(rows: pd.DataFrame) -> float:
        means = rows.groupby("method")[[variant, "gradients"]].mean()
        return float(stats.kendalltau(means[variant], means["gradients"]).statistic)

    return by_setting(runs, tau)


def bias(runs: pd.DataFrame, methods: Sequence[str]) -> pd.Series:
    """Return the geometric mean of predicted over measured gradients of these methods in each setting."""
    rows = runs[runs["method"].isin(methods)]
    return by_setting(rows, lambda rows: float(np.exp(np.log(rows["law"] / rows["gradients"]).mean())))


def claims(momenta: Sequence[float]) -> list[Claim]:
    """Return the claims; their numbers are those of each setting, and intervals those of their mean."""
    return [claim for momentum in momenta for claim in claims_of(momentum)]


def claims_of(momentum: float) -> list[Claim]:
    """Return the claims on one momentum."""

    def claim(says: str, number: Callable[[pd.DataFrame], pd.Series], **limits: float) -> Claim:
        return Claim(
            f"momentum {momentum:g}: {says}", "", lambda runs: number(runs[runs["momentum"] == momentum]), **limits
        )

    found = []
    for variant in VARIANTS:
        high, low = (1.25, 0.6) if variant == "law" else (np.inf, -np.inf)
        says = f"typical factor of error, {variant}"
        found.append(claim(says, functools.partial(error, variant=variant), high=high))
        says = f"Kendall's tau of the methods in a setting, {variant}"
        found.append(claim(says, functools.partial(order, variant=variant), low=low, unit=" tau"))
    for control in CONTROLS:
        number = ratio(functools.partial(error, variant=control), functools.partial(error, variant="law"))
        found.append(claim(f"typical factor of error, {control}, over the law's", number, low=1.0))
    for column, known in (("workers", 4), ("batch", 32)):
        says = f"typical factor of error of other {column}, fitted with {column} = {known}"
        found.append(claim(says, functools.partial(error_elsewhere, column=column, known=known)))
    found.append(claim("typical factor between seeds", scatter))
    for column in ("a, law", "kappa, law"):
        found.append(claim(column, lambda runs, column=column: runs[column].iloc[:1]))
    for kind, methods in {"synchronous": SYNCHRONOUS, "asynchronous": ASYNCHRONOUS}.items():
        found.append(claim(f"predicted / measured, {kind}", functools.partial(bias, methods=methods)))
    return found


def draw(runs: pd.DataFrame, folder: Path) -> None:
    """Draw predicted against measured gradients, a panel for each momentum, colours for methods, marks for settings."""
    momenta = sorted(runs["momentum"].unique())
    figure, axes = plotting.panels(1, len(momenta), height=2.8, sharey=True)
    marks = dict(zip(sorted(set(zip(runs["workers"], runs["batch"], strict=True))), "os^D", strict=False))
    ends = runs[["gradients", "law"]].to_numpy()
    line = [0.8 * ends.min(), 1.25 * ends.max()]
    for axis, momentum in zip(axes[0], momenta, strict=True):
        rows = runs[runs["momentum"] == momentum]
        for (workers, batch, method), each in rows.groupby(["workers", "batch", "method"]):
            axis.plot(
                each["gradients"],
                each["law"],
                marks[workers, batch],
                ms=4,
                mew=0.7,
                fillstyle="none",
                color=COLOURS[method],
            )
        axis.plot(line, line, color="0.5", lw=0.7, zorder=0)
        axis.set(title=f"momentum {momentum:g}", xscale="log", yscale="log", xlim=line, ylim=line)
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_locator(FixedLocator([200, 500, 1000, 2000]))
            ticks.set_major_formatter("{x:,.0f}")
            ticks.set_minor_formatter("")
        axis.grid(lw=0.3)
    methods = [Line2D([], [], ls="", marker="s", color=colour, ms=4, label=name) for name, colour in COLOURS.items()]
    hollow: Any = {"ls": "", "color": "0.3", "ms": 4, "fillstyle": "none"}
    settings = [
        Line2D([], [], marker=mark, **hollow, label=f"{workers} workers, batch {batch}")
        for (workers, batch), mark in marks.items()
    ]
    rows_of_legend = itertools.zip_longest(methods, settings)  # which is filled column by column
    handles = [handle for column in rows_of_legend for handle in column if handle is not None]
    figure.supxlabel("measured gradients to 95 % accuracy", fontsize=8)
    figure.supylabel("predicted", fontsize=8)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(methods), handlelength=1)
    plotting.save(figure, runs, folder, "law")


# ---- all of it ----


def best_factors(runs: pd.DataFrame) -> dict[tuple[Setting, str], float]:
    """Return the factor with the fewest gradients for each setting and method; a run that does not arrive is last."""
    best = {}
    for (workers, batch, momentum, method), rows in runs.groupby([*Setting._fields, "method"]):
        order = rows.assign(n=rows["gradients"].fillna(np.inf)).sort_values(["n", "factor"])
        best[Setting(int(workers), int(batch), float(momentum)), str(method)] = float(order["factor"].iloc[0])
    return best


def reproduce(
    out: Path, seeds: int, processes: int, console: Console, samples: int = SAMPLES, of: Sequence[Setting] = ()
) -> pd.DataFrame:
    """Simulate what is missing, fit the law, and write results, claims and the figure."""
    chosen = list(of) or settings()

    def run(points: Sequence[tuple[Setting, str, float, int]]) -> pd.DataFrame:
        names = {
            f"{setting}/{method.replace(' ', '-')}/{factor:g}/{seed}": (setting, method, factor, seed)
            for setting, method, factor, seed in points
        }
        simulate_all({name: job(*point, samples) for name, point in names.items()}, out / "runs", processes, console)
        return pd.DataFrame([measure(out / "runs" / name, *point) for name, point in names.items()])

    tried = run(list(itertools.product(chosen, METHODS, FACTORS, (TUNING_SEED,))))
    for _ in range(2):
        ends = [
            (*of_method, 2 * factor if factor >= max(FACTORS) else factor / 2, TUNING_SEED)
            for of_method, factor in best_factors(tried).items()
            if not min(FACTORS) < factor < max(FACTORS)
        ]
        more = [point for point in ends if not _has(tried, point)]
        if more:
            tried = pd.concat([tried, run(more)], ignore_index=True)
    best = best_factors(tried)
    seeds_of = range(FIRST_SEED, FIRST_SEED + seeds)
    runs = run([(*of_method, factor, seed) for of_method, factor in best.items() for seed in seeds_of])
    runs.to_csv(out / "law-runs.csv", index=False)
    arrived = fitted(runs)
    draw(arrived, out)
    conclude(
        claims(sorted(arrived["momentum"].unique())),
        arrived,
        out,
        console,
        f"N = a (d + phi / b), {len(arrived)} of {len(runs)} runs arrived",
    )
    return arrived


def _has(runs: pd.DataFrame, point: tuple[Setting, str, float, int]) -> bool:
    setting, method, factor, _ = point
    same = (runs["method"] == method) & (runs["factor"] == factor)
    for name, value in setting._asdict().items():
        same &= runs[name] == value
    return bool(same.any())
