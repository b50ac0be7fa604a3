"""Regret of advice: its parts on numbers made by hand, and the whole on one small setting in virtual time."""

import itertools
import json
import sys

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from hpcsync.cli.advice_candidates import candidate, label_of
from hpcsync.config.job import Job
from hpcsync.core.job_validation import check
from hpcsync.trace.reader import load
from reproductions import advise, real_ranks, regret
from reproductions.advise import Setting
from reproductions.claims import judged
from tests.unit.cli.test_advise import Inline


def made(times: dict[str, dict[str, list[float]]], advised: dict[str, str]) -> pd.DataFrame:
    """Runs with these times by setting, candidate and seed; NaN is one that never arrives, within 20 s."""
    others = dict(zip(times, reversed(list(times)), strict=True))
    return pd.DataFrame(
        [
            {"setting": setting, "candidate": label, "seed": seed, "time_s": time_s, "duration_s": 20.0, "place": place,
             "advised": advised[setting] == label, "other": others[setting], "low_s": 2.0, "high_s": 4.5,
             "samples": 100, "advice_s": 5.0, "profile_s": 1.0, "advice_samples": 700, "built_with": False,
             "law_seconds": place, "law_seconds_1": -place, "predicted_samples_per_s": place}
            for setting, of_setting in times.items()
            for place, (label, of_label) in enumerate(of_setting.items())
            for seed, time_s in enumerate(of_label)
        ]
    )  # fmt: skip


@pytest.fixture
def runs() -> pd.DataFrame:
    times = {
        "digits-equal-0": {"bsp": [4.0, 4.0, 4.0], "asp": [5.0, 6.0, 7.0], "ssp": [3.0, 9.0, 3.0]},
        "digits-1124-0": {"bsp": [9.0, 9.0, np.nan], "asp": [4.0, 3.0, 2.0], "ssp": [4.0, 5.0, 6.0]},
    }
    return regret.choices(made(times, {"digits-equal-0": "bsp", "digits-1124-0": "asp"}))


def test_regret_is_the_time_lost_beside_the_best_and_a_censored_run_counts_with_its_length(runs):
    assert regret.regret_of(runs, "advised").to_dict() == {"digits-equal-0": 0.0, "digits-1124-0": 0.0}
    table = regret.regrets(runs)
    assert table.loc["digits-equal-0", "asp"] == pytest.approx(0.5)
    assert table.loc["digits-1124-0", "bsp"] == pytest.approx((9 + 9 + 20) / 3 / 3 - 1)


def test_every_other_way_to_choose_is_worse_on_these_numbers(runs):
    """Controls: the advice of the other cluster, and the law and throughput, which are wrong here on purpose."""
    found = regret.others(runs)
    assert (found["the advice for the next cluster"] > 0).any() and (found["the law with phi = 1"] > 0).all()
    assert found["the law alone"].to_dict() == regret.regret_of(runs, "is bsp").to_dict()
    assert found["the highest throughput"]["digits-1124-0"] == pytest.approx(5 / 3 - 1)
    assert regret.fixed(runs) == "asp" and found["the best fixed choice"].mean() == pytest.approx(0.25)
    assert "the advice from shuffled times" not in found


def test_who_knows_all_seeds_but_one_can_be_wrong(runs):
    """On equal workers, seeds 0 and 2 say ssp (3 s), which takes 9 s with seed 1."""
    assert regret.with_fewer_seeds(runs)["digits-equal-0"] == pytest.approx((4 + 9 + 4) / 3 / 4 - 1)


def test_order_and_coverage(runs):
    assert regret.orders(runs)["digits-equal-0"] == pytest.approx(1 / 3)
    assert regret.covered(runs, "advised").to_dict() == {"digits-equal-0": 1.0, "digits-1124-0": 1.0}
    assert regret.covered(runs)["digits-equal-0"] == pytest.approx(5 / 9)
    assert regret.costs(runs)["digits-equal-0"] == pytest.approx(6 / 4)
    assert regret.samples(runs)["digits-equal-0"] == 7.0


def test_the_best_fixed_choice_is_a_candidate_in_every_setting(runs):
    only_there = runs[(runs["candidate"] != "asp") | (runs["setting"] == "digits-1124-0")]
    assert regret.regrets(only_there).mean().idxmin() == "asp" and regret.fixed(only_there) == "ssp"


def judge(numbers: list[float], high: float, statistic=regret.MEDIAN) -> pd.Series:
    claim = regret.Resampled("", "", lambda _: pd.Series(numbers), high=high, unit=" %", statistic=statistic)
    return judged([claim], pd.DataFrame()).iloc[0]


def test_the_interval_of_a_median_is_that_of_all_samples_with_replacement():
    numbers = [0.0, 1.0, 2.0, 30.0, 4.0]
    exact = np.median(np.array(list(itertools.product(numbers, repeat=5))), axis=1)
    row = judge(numbers, high=5.0)
    assert (row["mean"], row["low"], row["high"]) == (2.0, *np.quantile(exact, (0.025, 0.975)))
    assert row["verdict"] == "cannot be told" and row["high"] == 30.0
    assert judge([*numbers[:3], 3.0, 4.0], high=5.0)["verdict"] == "holds", "without the outlier it can be told"
    assert judge([9.0, *numbers[3:4]], high=5.0)["verdict"] == "does not hold"


def test_a_quantile_and_a_number_that_is_not_known():
    tenth = judge([1.0] * 9 + [11.0], high=5.0, statistic=regret.TENTH)
    assert (tenth["mean"], tenth["verdict"]) == (pytest.approx(2.0), "cannot be told")
    assert judge([1.0, np.nan], high=5.0)["verdict"] == "cannot be told"
    assert judge([1.0], high=5.0)["ours"] == "1.00 %"


def test_claims_are_over_the_settings(runs):
    found = judged(regret.claims(runs), runs).set_index("claim")
    assert (
        found.loc[["mean regret", "median regret", "runs of the advised candidate in the 80 % interval"], "seeds"]
        .eq(2)
        .all()
    )
    assert found.loc["median regret", "verdict"] == "holds" and found.loc["settings", "seeds"] == 1
    worse = runs.assign(advised=runs["candidate"] == "ssp")
    assert judged(regret.claims(worse), worse).set_index("claim").loc["median regret", "verdict"] == "does not hold"


def test_candidates_are_called_as_the_advice_calls_them():
    for label in advise.candidates(Setting("text", "narrow", 0.0)):
        assert label_of(candidate(advise.option(label))) == label


def test_every_job_is_valid_and_stragglers_follow_from_the_seed():
    for setting in advise.settings():
        check(advise.profile(setting))
        own = Job.from_table(advise.asked(setting))
        again = advise.real(setting, own.to_toml(), 101)
        assert again.stop == own.stop and again.workload == own.workload
    transient = Setting("digits", "transient", 0.0)
    first, second = (advise.real_cluster(transient, seed)["events"] for seed in (101, 102))
    assert first == advise.real_cluster(transient, 101)["events"] != second
    slow_s = sum((e["change"] == "recover") * e["at_s"] - (e["change"] == "slow") * e["at_s"] for e in first)
    assert 0.05 < slow_s / (advise.WORKERS * advise.EVENTS_S) < 0.25


@pytest.mark.parametrize(("before", "seconds"), [("asp", 4.0), ("bsp", 9.0)])
def test_an_earlier_advice_that_chose_another_candidate_does_not_predict_this_one(
    tmp_path, monkeypatch, before, seconds
):
    monkeypatch.setattr(advise, "CANDIDATES", ("bsp", "asp"))
    times = {"bsp": 4.0, "asp": 4.1}  # so near that the simplest is advised
    setting = advise.Setting("digits", "equal", 0.0)
    rows = [{"label": label, "predicted": {"seconds": s}, "time_s": {"mean": s}} for label, s in times.items()]
    found = {"advised": before, "predicted": {"seconds": 9.0}, "indistinguishable": list(times), "ranking": rows}
    (tmp_path / str(setting)).mkdir()
    advice = found | {"trials": [{"candidates": rows}]}
    (tmp_path / str(setting) / "advice.json").write_text(json.dumps(advice))
    (tmp_path / f"{setting}-cost.json").write_text("{}")
    (tmp_path / f"{setting}.toml").write_text(Job.from_table(advise.asked(setting)).to_toml())
    chosen = advise.advise(setting, tmp_path, tmp_path, 1)
    assert (chosen["advised"], chosen["predicted"]["seconds"]) == ("bsp", seconds)


@pytest.mark.parametrize("change", ["none", "candidates", "rate"])
def test_an_advice_on_another_job_or_on_other_candidates_is_asked_for_again(tmp_path, monkeypatch, change):
    setting, calls = advise.Setting("digits", "equal", 0.0), []
    answer = {"advised": None, "indistinguishable": [], "trials": [{"candidates": [{"label": "bsp"}]}]}

    def answered(file, labels, measured, folder, processes):
        calls.append(labels)
        folder.mkdir()
        (folder / "advice.json").write_text(json.dumps(answer))

    monkeypatch.setattr(advise, "command_line", answered)
    monkeypatch.setattr(advise, "CANDIDATES", ("bsp",))
    advise.advise(setting, tmp_path, tmp_path, 1)
    if change == "candidates":
        monkeypatch.setattr(advise, "CANDIDATES", ("bsp", "asp"))
    if change == "rate":
        faster = advise.WORKLOADS["digits"]._replace(rates={0.0: 0.8})
        monkeypatch.setitem(advise.WORKLOADS, "digits", faster)
    advise.advise(setting, tmp_path, tmp_path, 1)
    assert len(calls) == (1 if change == "none" else 2)


def test_one_setting_is_advised_on_and_run_and_nothing_is_repeated(tmp_path, monkeypatch):
    """Ranks are replaced by simulations of the same jobs."""
    from hpcsync.cli import advice_trials
    from hpcsync.cli import advise as command

    def virtually(jobs, out, link):
        from reproductions.simulating import simulate_all

        return simulate_all(jobs, out, 1, Console(quiet=True))

    def in_process(file, labels, measured, folder, processes):
        command.main(file, command.Asked(measured, [advise.option(label) for label in labels], out=folder))

    monkeypatch.setattr(advice_trials, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(advise, "run_all", virtually)
    monkeypatch.setattr(advise, "command_line", in_process)
    monkeypatch.setattr(advise, "CANDIDATES", ("bsp", "asp", "k-sync k=2"))
    few = advise.WORKLOADS["noisy"]._replace(stop={"target_accuracy": 0.5, "samples": 6_000})
    monkeypatch.setitem(advise.WORKLOADS, "noisy", few)
    setting, quiet = Setting("noisy", "1:1:2:4", 0.0), Console(quiet=True)
    found = advise.reproduce(tmp_path, 2, 1, quiet, [setting], control=True)
    assert len(found) == 3 * 2 and found["advised"].sum() == found["shuffled"].sum() == 2
    assert sorted(found["place"].unique()) == [0, 1, 2] and found["law_seconds"].notna().all()
    assert set(pd.read_csv(tmp_path / "settings.csv")["advised"]) <= set(advise.CANDIDATES)
    measured, altered = (
        load(tmp_path / where).tables["pushes"]["compute_s"]
        for where in (f"runs/{setting}/profile", f"shuffled/{setting}-profile")
    )
    assert sorted(measured) == sorted(altered) and not np.array_equal(measured, altered)
    made_at = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    again = advise.reproduce(tmp_path, 2, 1, quiet, [setting], control=True)
    assert made_at == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    pd.testing.assert_frame_equal(found, again)


def test_finished_runs_are_not_asked_of_ranks_again(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(real_ranks.subprocess, "run", lambda line, **_: asked.append(line))
    monkeypatch.setattr(real_ranks, "finished", lambda folder, job: folder.name == "a")
    job = advise.profile(Setting("noisy", "equal", 0.0))
    assert real_ranks.run_all({"a": job, "b": job}, tmp_path) == 1
    assert json.loads((tmp_path / "todo.json").read_text()) == [str(tmp_path / "b")]
    assert asked[0][4:6] == ["-n", "5"] and Job.from_toml((tmp_path / "b" / "asked.toml").read_text()) == job
    monkeypatch.setattr(real_ranks, "finished", lambda folder, job: True)
    assert real_ranks.run_all({"a": job, "b": job}, tmp_path) == 0 and len(asked) == 1
