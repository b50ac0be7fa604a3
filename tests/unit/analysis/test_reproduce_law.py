"""The law of gradients to a target: its parts on numbers made by hand, and the whole on one small setting."""

import itertools

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from hpcsync.core.job_validation import check
from hpcsync.trace.reader import load
from reproductions import law
from reproductions.claims import judged
from reproductions.law import METHODS, Setting


def made(phi: float, a: float, kappa: float) -> pd.DataFrame:
    """Runs that follow the law exactly."""
    rows = [
        {**setting._asdict(), "method": method, "size": size, "delay": delay, "covariance": 3 * phi, "square": 3.0}
        for setting in law.settings()
        for method, size, delay in (("BSP", setting.workers, 0.0), ("ASP", 1, setting.workers - 1.0), ("SSP 3", 1, 2.0))
    ]
    runs = pd.DataFrame(rows)
    return runs.assign(gradients=law.predicted(runs, phi, a, kappa), factor=1.0, seed=1)


def test_every_job_is_valid_and_k_is_half_of_the_workers():
    for setting in law.settings():
        for method in METHODS:
            job = law.job(setting, method, 1.0, 1)
            check(job)
            assert method != "k-sync" or job.paradigm.k == setting.workers // 2


def test_the_fit_finds_what_the_runs_were_made_with():
    runs = law.fitted(made(phi=20.0, a=100.0, kappa=0.5))
    assert np.allclose(runs["phi"], 20.0)
    assert np.allclose(runs[["a, law", "kappa, law"]], [100.0, 0.5], rtol=1e-2)
    assert (law.error(runs, "law") < 1.01).all() and (law.error(runs, "without noise") > 1.05).any()  # the control
    assert law.order(runs, "law").tolist() == pytest.approx([1.0] * 8)


def test_verdicts_are_over_the_settings_and_one_that_is_wrong_enough_leaves_them_open():
    """The law is fitted to runs of which those of one setting are then altered; the others keep their predictions."""
    runs = law.fitted(made(phi=20.0, a=100.0, kappa=0.5))
    runs = runs[runs["momentum"] == 0.0]
    wrong = runs.copy()
    of_one = (wrong["workers"] == 4) & (wrong["batch"] == 8)
    wrong.loc[of_one, "gradients"] *= 2.0
    says = [
        f"momentum 0: {words}, law"
        for words in ("typical factor of error", "Kendall's tau of the methods in a setting")
    ]
    for table, expected in ((runs, "holds"), (wrong, "cannot be told")):
        found = judged(law.claims([0.0]), table).set_index("claim")
        assert (found.loc[says[0], "verdict"], found.loc[says[0], "seeds"]) == (expected, 4)
    logs = np.log([2.0, 1.0, 1.0, 1.0])
    half = stats.t.ppf(0.975, 3) * logs.std(ddof=1) / 2
    row = found.loc[says[0]]
    assert (row["low"], row["high"]) == pytest.approx(tuple(np.exp(logs.mean() + np.array([-half, half]))), rel=1e-2)
    wrong.loc[of_one, "gradients"] = 1 / wrong.loc[of_one, "gradients"]
    assert judged(law.claims([0.0]), wrong).set_index("claim").loc[says[1], "verdict"] == "cannot be told"


def test_phi_is_that_of_gradients_with_known_noise():
    """Gradients of BSP in a trace, replaced by ones whose covariance is known."""
    rng, n, batch, size = np.random.default_rng(1), 4, 8, 50
    mean = rng.normal(size=size) / 5
    each = mean + rng.normal(size=(400, n, size)) * np.sqrt(2.0 / batch)
    trace = type("Trace", (), {})()
    pushes = np.zeros(400 * n, [("outcome", int), ("version_read", int), ("staleness", int), ("gradient_sq", float)])
    pushes["version_read"], pushes["gradient_sq"] = np.repeat(np.arange(400), n), (each**2).sum(-1).ravel()
    updates = np.zeros(400, [("gradient_sq", float)])
    updates["gradient_sq"] = (each.mean(1) ** 2).sum(-1)
    trace.tables = {"pushes": pushes, "updates": updates}
    trace.job = law.job(Setting(n, batch, 0.0), "BSP", 1.0, 1)
    covariance, square = law.noise(trace)
    assert covariance / 400 == pytest.approx(2.0 * size, rel=0.03)
    assert square / 400 == pytest.approx(float(mean @ mean), rel=0.1)


def test_the_best_factor_is_that_of_the_fewest_gradients():
    runs = pd.DataFrame(
        [{"workers": 4, "batch": 8, "momentum": 0.0, "method": "ASP", "factor": f, "gradients": g}
         for f, g in ((0.5, np.nan), (1.0, 30.0), (2.0, 20.0))]
    )  # fmt: skip
    assert law.best_factors(runs) == {(Setting(4, 8, 0.0), "ASP"): 2.0}


def test_one_setting_is_measured_and_nothing_is_simulated_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(law, "TARGET", 0.3)
    monkeypatch.setattr(law, "FACTORS", (1.0,))
    monkeypatch.setattr(law, "METHODS", {name: METHODS[name] for name in ("BSP", "ASP")})
    setting, quiet = Setting(2, 8, 0.0), Console(quiet=True)
    found = law.reproduce(tmp_path, 1, 1, quiet, samples=12_000, of=[setting])
    assert set(found["method"]) == {"BSP", "ASP"} and (found["phi"] > 0).all()
    assert (tmp_path / "law.png").exists() and (tmp_path / "claims.csv").exists()
    asp = found[found["method"] == "ASP"].iloc[0]
    trace = load(tmp_path / "runs" / f"{setting}" / "ASP" / f"{asp['factor']:g}" / str(law.FIRST_SEED))
    first = trace.tables["evaluations"]["version"][trace.tables["evaluations"]["accuracy"] >= 0.3][0]
    assert asp["gradients"] == first  # one gradient an update
    made_at = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/summary.json")}
    law.reproduce(tmp_path, 1, 1, quiet, samples=12_000, of=[setting])
    assert made_at == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/summary.json")}


def test_the_legend_has_a_row_of_methods_and_one_of_settings(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(law.plotting, "save", lambda figure, *_: figures.append(figure))
    settings = itertools.product((4, 8), (8, 32))
    rows = [
        {"workers": n, "batch": batch, "momentum": 0.0, "method": method, "gradients": 100.0 + n, "law": 90.0 + batch}
        for n, batch in settings
        for method in law.COLOURS
    ]
    law.draw(pd.DataFrame(rows), tmp_path)
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names[::2] == [*law.COLOURS], "the legend is filled column by column"
    assert all("workers, batch" in name for name in names[1::2])
