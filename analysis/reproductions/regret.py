"""Regret of choices: T(choice) / min T - 1, with T the mean time to the target of a candidate in a setting.

Tables have a row for each run; a choice is a column that is True at the candidate that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from reproductions.claims import Bounds, Claim


def means(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean times to the target by setting and candidate; a run that never arrives counts with its length."""
    known = runs.assign(t=runs["time_s"].fillna(runs["duration_s"]))
    return known.pivot_table("t", "setting", "candidate", sort=False)


def regrets(runs: pd.DataFrame) -> pd.DataFrame:
    """Return T / min T - 1 by setting and candidate."""
    times = means(runs)
    return times.div(times.min(axis=1), axis=0) - 1


def regret_of(runs: pd.DataFrame, choice: str) -> pd.Series:
    """Return the regret in each setting of a choice, which is a column that is True at the chosen candidate."""
    chosen = runs[runs[choice].astype(bool)].groupby("setting", sort=False)["candidate"].first()
    table = regrets(runs)
    return pd.Series({setting: table.loc[setting, label] for setting, label in chosen.items()}, dtype=float)


def with_fewer_seeds(runs: pd.DataFrame) -> pd.Series:
    """Return the regret in each setting of one who has run all candidates with all seeds but one, for that seed.

    What is best with some seeds need not be with another: no advice from other seeds can be expected to be better.
    """
    known = runs.assign(t=runs["time_s"].fillna(runs["duration_s"]))
    found = {}
    for setting, rows in known.groupby("setting", sort=False):
        times = rows.pivot(index="candidate", columns="seed", values="t")
        best = [times.drop(columns=seed).mean(axis=1).idxmin() for seed in times]
        chosen = np.mean([times.loc[label, seed] for label, seed in zip(best, times, strict=True)])
        found[setting] = chosen / times.mean(axis=1).min() - 1
    return pd.Series(found, dtype=float)


def fixed(runs: pd.DataFrame) -> str:
    """Return the candidate with the least mean regret, of those in all settings."""
    return str(regrets(runs).dropna(axis=1).mean().idxmin())


def orders(runs: pd.DataFrame, column: str = "place") -> pd.Series:
    """Return Kendall's tau between predicted and real order in each setting."""
    times = means(runs)
    found = {}
    for setting, rows in runs.groupby("setting", sort=False):
        places = rows.groupby("candidate")[column].first().dropna()
        found[setting] = stats.kendalltau(places, times.loc[setting, places.index]).statistic
    return pd.Series(found, dtype=float)


def covered(runs: pd.DataFrame, choice: str | None = None) -> pd.Series:
    """Return the share of runs within the predicted interval, in each setting; of all candidates that have one."""
    rows = runs.dropna(subset=["low_s"])
    rows = rows if choice is None else rows[rows[choice].astype(bool)]
    inside = (rows["low_s"] <= rows["time_s"]) & (rows["time_s"] <= rows["high_s"])
    return inside.groupby(rows["setting"], sort=False).mean()


OPPONENTS = {
    "always bsp": "is bsp",
    "always asp": "is asp",
    "the highest throughput": "throughput",
    "the law alone": "law",
    "the law with phi = 1": "phi = 1",
    "the simplest that is indistinguishable": "simplest",
    "the best of the first trial": "first trial",
    "the best of the second trial": "second trial",
    "the advice for the next cluster": "other cluster",
    "the advice from shuffled times": "shuffled",
}


def choices(runs: pd.DataFrame) -> pd.DataFrame:
    """Add a column for each choice that follows from the others.

    The column `other` names the setting whose advice is followed for the control.
    """
    first = runs.drop_duplicates(["setting", "candidate"]).set_index("candidate")

    def least(column: str) -> pd.Series:
        best = first.dropna(subset=[column]).groupby("setting", sort=False)[column].idxmin()
        return runs["candidate"] == runs["setting"].map(best)

    first["slowness"] = -first["predicted_samples_per_s"]
    advised = first[first["advised"]].reset_index().set_index("setting")["candidate"]
    of_other = runs["other"].map(advised)
    return runs.assign(
        **{
            "is bsp": runs["candidate"] == "bsp",
            "is asp": runs["candidate"] == "asp",
            "throughput": least("slowness"),
            "law": least("law_seconds"),
            "phi = 1": least("law_seconds_1"),
            "other cluster": runs["candidate"] == of_other,
        }
    )


DRAWS = 10_000  # of a bootstrap
MEDIAN = functools.partial(np.median, axis=-1)
TENTH = functools.partial(np.quantile, q=0.9, axis=-1)


@dataclass(frozen=True)
class Resampled(Claim):
    """On another statistic than the mean; its interval is that of a bootstrap over the numbers.

    Attributes
    ----------
    statistic
        Of numbers along the last axis.
    """

    statistic: Callable[[np.ndarray], Any] = MEDIAN

    def _interval(self, bounds: Bounds, known: np.ndarray) -> tuple[float, float, float]:
        if len(known) < max(1, len(bounds.known)):
            return super()._interval(bounds, known)
        values = known.astype(float)
        drawn = np.random.default_rng(0).choice(values, (DRAWS, len(values)))
        low, high = np.quantile(self.statistic(drawn), (0.025, 0.975))
        return float(self.statistic(values)), float(low), float(high)


def claims(runs: pd.DataFrame) -> list[Claim]:
    """Return the aims, and each opponent's and control's regret beyond the advice's, paired by setting.

    Numbers are those of each setting, and intervals those over the settings.
    """

    def each(values: pd.Series) -> Any:
        return lambda _: values

    def one(value: float) -> Any:
        return lambda _: pd.Series({0: value})

    reported = runs[~runs["built_with"]]
    advised = regret_of(reported, "advised")
    best = fixed(reported)
    found = [
        Claim("settings", "", one(float(len(advised))), low=24),
        Resampled("median regret", "", each(100 * advised), high=5, unit=" %"),
        Resampled("90th percentile of the regret", "", each(100 * advised), high=25, unit=" %", statistic=TENTH),
        Claim("largest regret", "", one(100 * advised.max()), unit=" %"),
        Claim("mean regret", "", each(100 * advised), unit=" %"),
    ]
    for name, value in others(reported).items():
        label = f"{name}, {best}" if name == "the best fixed choice" else name
        more = 100 * (value - advised[value.index])
        found.append(Claim(f"{label}: mean regret", "", each(100 * value), unit=" %"))
        found.append(Claim(f"{label}: beyond that of the advice", "", each(more), low=0, unit=" points"))
    inside, of_all = 100 * covered(reported, "advised"), 100 * covered(reported)
    found += [
        Claim("runs of the advised candidate in the 80 % interval", "", each(inside), 70, 90, " %"),
        Claim("runs of all candidates with an interval in it", "", each(of_all), 70, 90, " %"),
        Claim("Kendall's tau of the predicted order", "", each(orders(reported)), unit=" tau"),
        Claim("Kendall's tau of the law's order", "", each(orders(reported, "law_seconds")), unit=" tau"),
        Resampled("cost: seconds of advice and profile / of the advised run", "", each(costs(reported)), high=0.1),
        Resampled("samples of the advice / of the advised run", "", each(samples(reported))),
        Claim("runs that never arrive", "", one(float(reported["time_s"].isna().sum()))),
        Claim("runs", "", one(float(len(reported)))),
    ]
    return found


def others(runs: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the regrets of the opponents and controls, by name."""
    found = {
        name: regret_of(runs, column) for name, column in OPPONENTS.items() if column in runs and runs[column].any()
    }
    found["the best fixed choice"] = regrets(runs)[fixed(runs)]
    found["all seeds but one"] = with_fewer_seeds(runs)
    return found


def costs(runs: pd.DataFrame) -> pd.Series:
    """Return the time of advice and profile over the mean time of the run that is advised, in each setting."""
    rows = runs[runs["advised"]].groupby("setting", sort=False)
    return (rows["advice_s"].first() + rows["profile_s"].first()) / rows["time_s"].mean()


def samples(runs: pd.DataFrame) -> pd.Series:
    """Return the samples whose gradients the advice computes over those of the run that it advises, in each setting."""
    rows = runs[runs["advised"]].groupby("setting", sort=False)
    return rows["advice_samples"].first() / rows["samples"].mean()


def by_setting(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each setting: the advised and the best candidate, their times, regret, order and coverage."""
    times = means(runs)
    first = runs[runs["advised"]].drop_duplicates("setting").set_index("setting")
    frame = pd.DataFrame({"advised": first["candidate"], "best": times.idxmin(axis=1)})
    frame["best_s"] = times.min(axis=1)
    frame["regret"] = regret_of(runs, "advised")
    for name, value in others(runs).items():
        frame[name] = value
    frame["tau"], frame["covered"] = orders(runs), covered(runs, "advised")
    frame["cost"], frame["cost in samples"] = costs(runs), samples(runs)
    frame["censored"] = runs["time_s"].isna().groupby(runs["setting"], sort=False).sum()
    return frame.loc[list(times.index)]
