"""The reproduction about ASHL and ADSP: clusters are as uneven as they are called, verdicts say what results say."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from reproductions import ashl, tuning
from reproductions.claims import judged

SEED = ashl.FIRST_SEED


@pytest.fixture(scope="module")
def jobs():
    return ashl.jobs(1)


def of(jobs, setting, arm, method):
    return jobs[ashl.name_of(setting, arm, method, SEED)]


# ---- jobs ----


def test_all_methods_meet_the_same_cluster_and_data(jobs):
    for run in {tuple(name.split("/")[:2]) for name in jobs}:
        found = [job for name, job in jobs.items() if name.startswith("/".join(run) + "/")]
        assert all(seen(job) == seen(found[0]) for job in found)


def seen(job):
    network = job.cluster.network.model_dump(exclude={"server_bandwidth_gbit"})  # which local SGD does not have
    return job.cluster.compute, network, job.workload, job.stop, job.evaluation


def test_steps_go_by_the_family_but_where_they_are_varied(jobs):
    for name, job in jobs.items():
        _, arm, method, _ = name.split("/")
        lr = ashl.SERVER_LR if method in ("BSP", "ASP", "SSP") else ashl.LOCAL_LR
        assert job.optimizer.lr == lr * ashl.RATES.get(arm, 1.0)


def test_clusters_are_as_uneven_as_they_say_and_of_one_speed(jobs):
    for workers, unevenness in ashl.SETTINGS:
        job = of(jobs, ashl.setting_of(workers, unevenness), "main", "ASHL")
        speeds = 1 / np.array(job.cluster.compute.seconds)
        assert len(speeds) == job.cluster.workers == workers
        assert speeds.mean() / speeds.min() == pytest.approx(unevenness)
        assert speeds.mean() == pytest.approx(1 / ashl.MEAN_S)


def test_links_are_as_slow_as_they_say_and_not_those_of_slow_workers(jobs):
    for slowest in ashl.LINKS:
        gbit = np.array(of(jobs, ashl.BASE, ashl.arm_of("links", slowest), "ASHL").cluster.network.bandwidth_gbit)
        push_s = 4 * ashl.PARAMETERS * 8e-9 / gbit
        assert push_s.max() == pytest.approx(slowest * ashl.MEAN_S)
        assert push_s.max() / push_s.min() == pytest.approx(ashl.SPREAD)
    for workers, unevenness in ashl.SETTINGS:
        cluster = of(jobs, ashl.setting_of(workers, unevenness), "main", "ADSP").cluster
        ranks = np.argsort(np.argsort(cluster.network.bandwidth_gbit))
        assert abs(np.corrcoef(ranks, np.arange(workers))[0, 1]) < 0.4
        assert cluster.network.server_bandwidth_gbit == pytest.approx(sum(cluster.network.bandwidth_gbit))


def test_a_variant_is_ashl_with_one_thing_another(jobs):
    whole = of(jobs, ashl.BASE, "main", "ASHL")
    for part, variants in ashl.PARTS.items():
        for name in variants:
            job = of(jobs, ashl.BASE, "main", f"ASHL, {name}")
            others = {key for key, value in vars(job.paradigm).items() if value != getattr(whole.paradigm, key)}
            others |= {"codec"} if job.compression != whole.compression else set()
            assert others <= ABOUT[part] and others, name


ABOUT = {
    "H": {"steps_coarse", "steps_fine", "loss_preset"},
    "switch": {"loss_preset"},
    "R": {"ratio_coarse", "ratio_fine", "codec"},
    "share": {"share"},
    "profile": {"warmup", "profiled"},
}


def test_what_is_as_usual_is_run_once(jobs):
    arms = {name.split("/")[1] for name in jobs}
    assert not arms & {f"links-{ashl.SLOWEST:g}", f"period-{ashl.PERIOD_S:g}"}
    assert of(jobs, ashl.BASE, "period-4", "ADSP").paradigm.check_period_s == 4.0


def test_searches_differ_in_how_commits_are_found():
    jobs = ashl.searching_jobs(2)
    links = (len(ashl.LINKS) - 1) * len(ashl.SEARCHED)
    assert len(jobs) == 2 * (len(ashl.SETTINGS) * len(ashl.SEARCHES) + links)
    evaluated, usual, given = (
        jobs[ashl.name_of(ashl.BASE, "main", method, SEED)] for method in ("ADSP, evaluated", "ADSP", "ADSP, fixed")
    )
    same = {"name", "paradigm"}
    assert evaluated.model_dump(exclude=same) == usual.model_dump(exclude=same) == given.model_dump(exclude=same)
    assert (evaluated.paradigm.loss, usual.paradigm.loss) == ("evaluation", "commits")
    assert (evaluated.paradigm.commits, usual.paradigm.commits, given.paradigm.commits) == (None, None, ashl.FIXED)


def test_a_fine_stage_before_the_targets_is_ashl_with_another_switch_in_every_cluster():
    jobs = ashl.searching_jobs(1)
    for setting in (ashl.setting_of(*each) for each in ashl.SETTINGS):
        fine, usual = (jobs[ashl.name_of(setting, "main", method, SEED)] for method in (ashl.FINE, "ASHL"))
        same = {"name", "paradigm"}
        assert fine.model_dump(exclude=same) == usual.model_dump(exclude=same)
        assert fine.paradigm.options == usual.paradigm.options | {"loss_preset": 2.0}


def test_what_both_parts_run_is_the_same_run(jobs):
    searching = ashl.searching_jobs(1)
    both = searching.keys() & jobs.keys()
    assert {name.split("/")[1] for name in both} == {ashl.arm_of("links", slowest) for slowest in ashl.LINKS}
    assert all(searching[name] == jobs[name] for name in both)


def test_readings_differ_in_when_commits_are_applied():
    jobs = ashl.reading_jobs(2)
    assert len(jobs) == 2 * len(ashl.READINGS) == 8
    for bound in ashl.BOUNDS:
        at_once, later = (
            jobs[ashl.name_of(ashl.BASE, "main", f"ASHL, {commit}, staleness {bound}", SEED)]
            for commit in ("on arrival", "after gate")
        )
        assert at_once.model_dump(exclude={"name", "paradigm"}) == later.model_dump(exclude={"name", "paradigm"})
        assert {**at_once.paradigm.options, "commit": "after-gate"} == later.paradigm.options
        assert (at_once.paradigm.commit, at_once.paradigm.staleness) == ("on-arrival", bound)


def test_a_reading_that_takes_longer_is_told():
    jobs = ashl.reading_jobs(1)
    for ratio, verdict in ((1.0, "holds"), (1.5, "does not hold")):
        frame = results(jobs, lambda arm, method, ratio=ratio: 10.0 * (ratio if "gate" in method else 1.0))
        found = judged(ashl.reading_claims(), frame)
        times = found[found["claim"].str.contains("/ with commits on arrival")]
        assert len(times) == 4 and set(times["verdict"]) == {verdict} and times["mean"].to_list() == [ratio] * 4


def test_ratios_are_those_of_the_slowest_and_the_fastest_link():
    rows = [(b"stage", 1.0), (b"ratio", 0.2), (b"ratio", 0.9), (b"ratio", 0.5), (b"stage", 2.0), (b"ratio", 1.0)]
    decisions = np.array(rows, [("controller", "S16"), ("chosen", "<f8")])
    network = SimpleNamespace(network=SimpleNamespace(bandwidth_gbit=(0.4, 0.1, 0.2)))
    trace = SimpleNamespace(tables={"decisions": decisions}, job=SimpleNamespace(cluster=network))
    assert ashl.ratios(trace) == {"ratio_slowest": 0.9, "ratio_fastest": 0.2}
    trace.tables["decisions"] = decisions[:1]
    assert np.isnan(list(ashl.ratios(trace).values())).all()


# ---- claims ----


def results(jobs, seconds, error=lambda method: 0.02, waits=0.0):
    """Results of all runs; seconds(arm, method) to the targets, NaN for never."""
    rows = []
    for name in jobs:
        setting, arm, method, seed = name.split("/")
        method = method.replace("_", " ")
        time_s = seconds(arm, method)
        at_least_s = 99.0 if np.isnan(time_s) else time_s
        row = {"setting": setting, "arm": arm, "paradigm": method, "seed": int(seed), "error": error(method)}
        row |= {"coarse_s": 2.0, "fine_s": 3.0, "found": 1.0}
        row |= {
            "accuracy_s": time_s,
            "loss_s": time_s,
            "accuracy_at_least_s": at_least_s,
            "loss_at_least_s": at_least_s,
        }
        rows.append(
            row | {"waits": waits, "waits_after": waits, "megabytes": 1.0, "ratio_slowest": 0.1, "ratio_fastest": 1.0}
        )
    return pd.DataFrame(rows)


def judge(frame, *says):
    """All claims whose words have one of these in them."""
    claims = [claim for claim in ashl.claims() if any(words in claim.says for words in says)]
    return judged(claims, frame).set_index("claim")


ONE_SETTING = "10 workers, H = 2,", "10 workers, H = 2:", "least of ADSP's time"


def as_claimed(arm, method):
    family = method.split(",")[0]
    return {"ASHL": 6.0, "ADSP": 10.0}.get(family, 30.0)


def test_were_it_as_claimed_every_published_claim_would_hold(jobs):
    verdicts = judge(results(jobs, as_claimed, lambda method: 0.01 if "ASHL" in method else 0.02), *ONE_SETTING)
    published = verdicts[(verdicts["published"] + verdicts["expected"]) != ""]
    assert (published["verdict"] == "holds").all() and len(published) == 13


def test_were_all_alike_nobody_would_be_sooner_nor_wait(jobs):
    verdicts = judge(results(jobs, lambda arm, method: 10.0), *ONE_SETTING)
    assert not (verdicts["verdict"][verdicts["criterion"].isin(["≤ 0.65", "≤ 0.376"])] == "holds").any()
    assert (verdicts["verdict"][verdicts.index.str.contains("wait after")] == "holds").all()
    waiting = judge(results(jobs, lambda arm, method: 10.0, waits=0.1), "wait after")
    assert len(waiting) == len(ashl.SETTINGS) and not (waiting["verdict"] == "holds").any()


def test_the_least_ratio_is_that_of_one_cluster_for_all_seeds():
    """Each cluster is soonest with one seed by chance: each seed's least would hold, and no cluster's mean does."""
    jobs = ashl.jobs(5)
    frame = results(jobs, lambda arm, method: 10.0 if method == "BSP" else 5.0)
    seeds = ashl.FIRST_SEED + np.arange(5)
    adsp = (frame["paradigm"] == "ADSP") & (frame["arm"] == "main")
    for setting, seed in zip(ashl.SETTINGS, seeds, strict=False):
        lucky = adsp & (frame["setting"] == ashl.setting_of(*setting)) & (frame["seed"] == seed)
        frame.loc[lucky, ["loss_s", "loss_at_least_s"]] = 3.0
    says = "least of ADSP's time / BSP's, by the loss"
    found = judge(frame, says).loc[says]
    assert found["mean"] == pytest.approx((0.3 * 0.5**4) ** 0.2) and found["verdict"] != "holds"
    uneven = adsp & (frame["setting"] == "4-3.2")
    frame.loc[uneven, ["loss_s", "loss_at_least_s"]] = 3.0
    found = judge(frame, says).loc[says]
    assert (found["mean"], found["verdict"]) == (pytest.approx(0.3), "holds"), "the control"


def test_who_never_gets_there_beats_nobody_and_is_beaten(jobs):
    says = "10 workers, H = 2, by the loss: ASHL's time / ADSP's"
    for never, holds in (("ASHL", False), ("ADSP", True)):
        frame = results(jobs, lambda arm, method, never=never: np.nan if method == never else 10.0)
        verdict = judge(frame, says).loc[says]
        assert (verdict["verdict"] == "holds") == holds and verdict["unknown"] == 1
    neither = results(jobs, lambda arm, method: np.nan if method in ("ASHL", "ADSP") else 10.0)
    assert judge(neither, says).loc[says, "verdict"] == "cannot be told"


def test_a_profile_that_is_not_counted_is_subtracted(jobs):
    says = "10 workers, H = 2, by the loss: the same, ASHL's time after its profile"
    for ashl_s, verdict in ((8.4, "holds"), (8.6, "does not hold")):
        frame = results(jobs, lambda arm, method, ashl_s=ashl_s: ashl_s if method == "ASHL" else 10.0)
        found = judge(frame, says).loc[says]
        assert found["verdict"] == verdict and found["mean"] == pytest.approx((ashl_s - 2.0) / 10.0)


def test_a_worse_model_is_no_better(jobs):
    says = "10 workers, H = 2: ADSP's error above ASHL's after as many samples"
    worse = results(jobs, as_claimed, lambda method: 0.03 if method == "ASHL" else 0.02)
    assert (
        judge(results(jobs, as_claimed), says).loc[says, "verdict"]
        == "holds"
        != judge(worse, says).loc[says, "verdict"]
    )


def test_from_which_on_it_holds_counts_from_the_far_end(jobs):
    says = "how many iterations ADSP's check period must have for ASHL to need at most 0.65 of its time"
    far = {"period-2": 10.0, "period-4": 10.0}
    for more, expected in (({}, 100.0), ({"period-0.25": 10.0}, 100.0), ({"period-4": 6.0}, np.nan)):
        frame = results(jobs, lambda arm, method, more=more: (far | more).get(arm, 6.0))
        found = judge(frame, says).loc[says]
        assert found["verdict"] != "holds" and found["mean"] == pytest.approx(expected, nan_ok=True)


def test_a_step_with_which_a_method_never_gets_there_takes_longer(jobs):
    says = "half the step: ASHL's time / with its own"
    for arm, verdict in (("half", "holds"), ("main", "does not hold")):
        frame = results(jobs, lambda at, method, arm=arm: np.nan if (at, method) == (arm, "ASHL") else 10.0)
        assert judge(frame, says).loc[says, "verdict"] == verdict


def test_a_variant_is_judged_by_each_target_from_the_tables_of_the_figures(jobs, tmp_path):
    frame = results(jobs, lambda arm, method: 10.0)
    frame.loc[frame["paradigm"] == "ASHL, at once", "accuracy_s"] = 15.0
    main = frame[frame["arm"] == "main"]
    main[main["paradigm"].isin(ashl.METHODS)].to_csv(tmp_path / "ashl-times.csv", index=False)
    parts = main[(main["setting"] == ashl.BASE) & main["paradigm"].isin(["ASHL", *ashl.VARIANTS])]
    parts.drop(columns=["setting", "arm"]).to_csv(tmp_path / "ashl-parts.csv", index=False)
    found = judged(ashl.table_claims(), ashl.table_results(tmp_path)).set_index("claim")
    compared = found["verdict"][found["criterion"] == "0.909091 to 1.1"]
    assert len(compared) == 2 * len(ashl.VARIANTS)
    assert compared.index[compared == "does not hold"].to_list() == ["ASHL, at once, by the accuracy: time / ASHL's"]
    assert (compared.drop("ASHL, at once, by the accuracy: time / ASHL's") == "holds").all()
    assert not (found["seeds"] == 0).any() and not found["unknown"].any()


def searching_jobs():
    """All runs and those with chosen rates."""
    tuned = {ashl.name_of(ashl.BASE, "tuned", method, SEED): None for method in ashl.SEARCHES_RATED}
    return ashl.searching_jobs(1) | tuned


def test_were_ashl_as_claimed_it_would_beat_both_searches_on_every_link():
    frame = results(searching_jobs(), as_claimed, lambda method: 0.01 if "ASHL" in method else 0.02)
    verdicts = judged(ashl.searching_claims(), frame)
    published = verdicts[(verdicts["published"] + verdicts["expected"]) != ""]
    assert (published["verdict"] == "holds").all()
    assert len(published) == len(ashl.SETTINGS) * 7 + len(ashl.LINKS) * 4 + 6


@pytest.mark.parametrize("slow", ["ASHL", ashl.FINE])
def test_an_ashl_that_is_no_sooner_does_not_hold_whatever_the_other_one_does(slow):
    frame = results(searching_jobs(), lambda arm, method: 10.0 if method == slow else as_claimed(arm, method))
    verdicts = judged(ashl.searching_claims(), frame).set_index("claim")["verdict"]
    for method, said in ashl.SAID.items():
        found = verdicts[verdicts.index.str.endswith(f": {said} / {ashl.FAIR}")]
        assert set(found) == {"does not hold" if method == slow else "holds"}
        assert len(found) == 2 * (len(ashl.SETTINGS) + len(ashl.LINKS) + 1)


def test_a_fine_stage_after_the_targets_is_told():
    for ends_s, verdict in ((4.0, "holds"), (2.5, "does not hold")):
        frame = results(searching_jobs(), lambda arm, method, ends_s=ends_s: ends_s)
        verdicts = judged(ashl.searching_claims(), frame).set_index("claim")["verdict"]
        found = verdicts[verdicts.index.str.contains("when that fine stage begins")]
        assert set(found) == {verdict} and len(found) == 2 * len(ashl.SETTINGS)


# ---- all of it, small ----


def test_a_second_call_simulates_nothing_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "SEEDS", (1,))
    monkeypatch.setattr(ashl, "RATED", ("BSP", "local SGD"))
    every = ashl.jobs

    def few(seeds, length):
        names = [ashl.name_of(ashl.BASE, "main", m, SEED) for m in ("ADSP", "ADSP, fixed", "ASHL", "BSP", "local SGD")]
        return {name: job for name, job in every(seeds, length).items() if name in names}

    monkeypatch.setattr(ashl, "jobs", few)
    console = Console(quiet=True)
    first = ashl.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for draw in ("draw_times", "draw_where", "draw_parts"):
        monkeypatch.setattr(ashl, draw, lambda *_: None)
    second = ashl.reproduce(tmp_path, 1, 1, console, length=1 / 100)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    pd.testing.assert_frame_equal(first, second)
    names = {path.name for path in tmp_path.iterdir()}
    tables = {"ashl-where.csv", "claims.csv", "tables-claims.csv", "results.csv"}
    assert {"ashl-times.png", "ashl-parts.svg", *tables} <= names
    found = pd.read_csv(tmp_path / "results.csv").query("arm == 'main'").set_index("paradigm")
    assert found.loc["BSP", "waits"] > 0.3 and found.loc["ADSP, fixed", "waits"] < 0.01 < found.loc["BSP", "transfers"]
    assert np.isnan(found.loc["ADSP", "search_s"]) and found.loc["ADSP, fixed", "search_s"] == 0


def test_searches_that_are_cut_continue_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "SEEDS", (1,))
    monkeypatch.setattr(ashl, "SEARCHES_RATED", (ashl.FINE,))
    monkeypatch.setattr(ashl, "SETTINGS", ashl.SETTINGS[:1])
    monkeypatch.setattr(ashl, "LINKS", (ashl.SLOWEST, 32.0))
    console = Console(quiet=True)
    first = ashl.reproduce_searches(tmp_path, 1, 1, console, length=1 / 100)
    runs = {path.parent: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("summary.json")}
    cut = tmp_path / "runs" / ashl.name_of(ashl.BASE, "links-32", ashl.FINE, SEED)
    (cut / "summary.json").unlink()
    second = ashl.reproduce_searches(tmp_path, 1, 1, console, length=1 / 100)
    pd.testing.assert_frame_equal(first, second)
    assert {path for path, at in runs.items() if (path / "summary.json").stat().st_mtime_ns != at} == {cut}
    assert len(runs) == len(ashl.SEARCHES) + len(ashl.SEARCHED) + 1 + 3  # one chosen; factors 1, 2 and 4 or less
