"""The reproduction about adaptive k and batches by speed: clusters are of one speed, verdicts say what results say."""

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from reproductions import first_k, first_k_real, long_iterations, tuning
from reproductions.claims import judged

SEED = first_k.FIRST_SEED


@pytest.fixture(scope="module")
def jobs():
    return first_k.jobs(1)


def of(jobs, setting, rate, method):
    return jobs[first_k.name_of(setting, rate, method, SEED)]


# ---- jobs ----


def test_all_methods_meet_the_same_clusters_data_and_steps(jobs):
    for rate in ("plain", "momentum"):
        for where in first_k.CLUSTERS:
            found = [job for name, job in jobs.items() if name.startswith(f"{where}/{rate}/")]
            assert all((j.cluster, j.workload, j.optimizer) == first(found) for j in found)
    scales = {name.split("/")[1]: job.optimizer.async_lr_scale for name, job in jobs.items()}
    assert scales == {"plain": "1/workers", "momentum": "1/workers", "published": 1.0}


def first(found):
    return found[0].cluster, found[0].workload, found[0].optimizer


def test_batches_are_given_out_where_the_name_says_so(jobs):
    for name, job in jobs.items():
        assert (job.batches.policy != "equal") == ("batches" in name)


def test_unlike_workers_are_as_fast_in_all_as_equal_ones(jobs):
    equal, unlike = (
        of(jobs, where, "plain", "BSP").cluster.compute.seconds for where in ("homogeneous", "heterogeneous")
    )
    assert len(unlike) == 8 and sum(1 / s for s in unlike) == pytest.approx(8 / equal)
    real, equal_s = first_k_real.SECONDS, first_k_real.EQUAL_S
    assert sum(1 / s for s in real) == pytest.approx(len(real) / equal_s)


def test_contended_workers_are_as_fast_in_the_long_run():
    left = []
    for seed in range(20):
        table = first_k.job("contended", "plain", "BSP", seed).model_dump()
        table["cluster"]["events"] = first_k.contention(seed, 1000.0, longer=2)
        left.append(first_k.speed_left(first_k.Job.from_table(strip(table)), 1000.0))
    assert np.mean(left) == pytest.approx(first_k.LEFT, rel=0.02)


def strip(table):
    """Without what is None: a job's table has no such thing."""
    if isinstance(table, dict):
        return {key: strip(value) for key, value in table.items() if value is not None}
    return [strip(value) for value in table] if isinstance(table, list | tuple) else table


def test_jobs_come_to_a_node_and_go_for_both_of_its_workers():
    events = first_k.contention(1, 60.0)
    for node in range(4):
        one, other = (
            [(e["at_s"], e["change"], e.get("factor")) for e in events if e["worker"] == 2 * node + i] for i in (0, 1)
        )
        assert one == other and [change for _, change, _ in one] == ["slow", "recover"] * (len(one) // 2)
        assert [at_s for at_s, _, _ in one] == sorted(at_s for at_s, _, _ in one)
        assert {factor for _, _, factor in one} <= {None, 2.0, 3.0, 4.0} and one[0][0] >= 0
    assert first_k.contention(2, 60.0) != events == first_k.contention(1, 60.0)


def test_some_nodes_are_contended_from_the_start():
    begins = [first_k.contention(seed, 60.0, longer) for seed in range(30) for longer in (1, 10)]
    at_once = np.mean([sum(e["at_s"] == 0.0 for e in events) / first_k.WORKERS for events in begins])
    assert at_once == pytest.approx(first_k.SHARED_S / (first_k.ALONE_S + first_k.SHARED_S), abs=0.1)


def test_speed_left_counts_events_up_to_a_time():
    table = strip(first_k.job("heterogeneous", "plain", "BSP", 1).model_dump())
    slow = {"worker": 0, "at_s": 1.0, "change": "slow", "factor": 2.0}
    table["cluster"]["events"] = [slow, {"worker": 0, "at_s": 3.0, "change": "recover"}]
    job = first_k.Job.from_table(table)
    share = 1 / sum(1 / slowness for slowness in first_k.SLOWNESS)  # of the cluster's speed, that is worker 0's
    assert first_k.speed_left(job, 1.0) == pytest.approx(1.0)
    assert first_k.speed_left(job, 2.0) == pytest.approx(1.0 - share / 4)
    assert first_k.speed_left(job, 4.0) == pytest.approx(1.0 - share / 4)


# ---- claims ----


def results(jobs, number, error=lambda setting, method: 0.02):
    """Results of all runs; number(setting, rate, method) gives the seconds to the targets, NaN for never."""
    rows = []
    own = [name.replace("/plain/", "/tuned/") for name in jobs if name.startswith("heterogeneous/plain/")]
    for name in (*jobs, *own):
        setting, rate, method, seed = name.split("/")
        method = method.replace("_", " ")
        seconds = number(setting, rate, method)
        at_least_s = 99.0 if np.isnan(seconds) else seconds
        row = {"setting": setting, "arm": rate, "paradigm": method, "seed": int(seed), "samples_per_s": 1.0}
        for by in ("accuracy", "loss"):
            row |= {f"{by}_s": seconds, f"{by}_at_least_s": at_least_s}
            row |= {f"{by}_even_s": seconds, f"{by}_even_at_least_s": at_least_s}
        rows.append(row | {f"error_{e:g}_s": seconds for e in first_k.EARLY} | {"error": error(setting, method)})
    return pd.DataFrame(rows)


def holding(frame, claims=None):
    return set(judged(claims or first_k.claims(), frame).query("verdict == 'holds'")["claim"])


def as_claimed(setting, rate, method):
    if setting in ("heterogeneous", "contended", "contended-long") and method in ("BSP", "ASP"):
        return 20.0
    return 10.0


def test_were_it_as_claimed_every_claim_would_hold(jobs):
    held = holding(results(jobs, as_claimed))
    effects = {f"{method}'s time / BSP's with equal workers" for method in ("BSP", "ASP")}
    missing = {claim.says for claim in first_k.claims() if claim.criterion} - held
    assert {says.split(": ")[1] for says in missing} == effects


def test_were_all_alike_nobody_would_be_sooner(jobs):
    held = holding(results(jobs, lambda setting, rate, method: 10.0))
    assert not any("sooner than" in says for says in held)
    assert "heterogeneous, plain SGD, by the loss: k-sync state + batches's time / BSP's with equal workers" in held


def test_who_never_gets_there_beats_nobody_and_is_beaten(jobs):
    def number(setting, rate, method):
        return np.nan if method == "k-sync state" or (method == "ASP" and setting != "homogeneous") else 10.0

    held = holding(results(jobs, number))
    assert not any("k-sync state sooner" in says for says in held)
    assert "contended, momentum 0.9, by the accuracy: BSP + batches sooner than ASP" in held
    assert "contended, momentum 0.9, by the accuracy: BSP + batches sooner than BSP" not in held


def test_adasync_is_beside_the_soonest_k_of_each_error(jobs):
    def number(setting, rate, method):
        return {"k-sync 1": 5.0, "k-sync loss": 6.0}.get(method, 10.0)

    says = "exponential times, noisy labels: AdaSync's times to 5 errors / those of the soonest k"
    ends = "exponential times, noisy labels: AdaSync ends no worse than k = 8"
    claims = [claim for claim in first_k.claims() if claim.says in (says, ends)]
    assert len(claims) == 2
    verdict = judged(claims, results(jobs, number)).set_index("claim").loc[says]
    assert verdict["mean"] == pytest.approx(1.2) and verdict["verdict"] != "holds"
    seeds = results(first_k.jobs(5), number)
    early = (seeds["paradigm"] == "k-sync 2") & (seeds["arm"] == "published")
    columns = [f"error_{share:g}_s" for share in first_k.EARLY]
    seeds.loc[early, columns] = 1.0
    assert judged(claims, seeds).set_index("claim").loc[says, "mean"] == pytest.approx(6.0), "the control"
    seeds.loc[early & (seeds["seed"] != first_k.FIRST_SEED), columns] = np.nan
    found = judged(claims, seeds).set_index("claim").loc[says, "mean"]
    assert found == pytest.approx(1.2), "a k that arrives with one of five seeds is not the soonest"
    worse = results(jobs, number, lambda setting, method: 0.03 if method == "k-sync loss" else 0.02)
    assert ends in holding(results(jobs, number), claims) and ends not in holding(worse, claims)


def test_on_real_ranks_the_claims_are_about_runs_that_there_are():
    names = [name.split("/") for name in first_k_real.jobs(2)]
    frame = pd.DataFrame(names, columns=["setting", "arm", "paradigm", "seed"])
    for by in ("accuracy", "loss"):
        frame[[f"{by}{end}" for end in ("_s", "_at_least_s", "_even_s", "_even_at_least_s")]] = 10.0
    frame["paradigm"] = frame["paradigm"].str.replace("_", " ")
    judgements = judged(first_k_real.claims(), frame)
    assert (judgements["mean"] == 1.0).all() and (judgements["seeds"] == 2).all()


# ---- long iterations ----


def test_long_iterations_are_ten_times_as_long_on_the_same_cluster_for_all_methods(tmp_path):
    for name in ("periodic", "stalls"):
        long_iterations.write_times(tmp_path, name, SEED)
    made = long_iterations.jobs(1, tmp_path)
    for where in long_iterations.CLUSTERS:
        found = [job for name, job in made.items() if name.startswith(f"{where}/plain/")]
        assert len(found) == len(long_iterations.METHODS)
        assert all((j.cluster, j.workload, j.optimizer) == first(found) for j in found)
    periodic, stalls = (pd.read_csv(tmp_path / f"{name}-{SEED}.csv") for name in ("periodic", "stalls"))
    assert periodic["seconds"].mean() == pytest.approx(10 * first_k.EQUAL_S, rel=0.02)
    own = periodic["seconds"][periodic["worker"] == 3].to_numpy()
    assert np.corrcoef(own[:-12], own[12:])[0, 1] > 0.7 > -0.7 > np.corrcoef(own[:-6], own[6:])[0, 1]
    medians = stalls.groupby("worker")["seconds"].median() / stalls["seconds"][stalls["worker"] == 0].median()
    assert medians.to_numpy() == pytest.approx(first_k.SLOWNESS, rel=0.1)


def test_verdicts_on_long_iterations_follow_the_times(tmp_path):
    def seconds(method):
        return {"k-sync 6 + batches": 1.0, "BSP + batches by gru": 1.5}.get(method, 2.0)

    rows = []
    for name in long_iterations.jobs(2, tmp_path):
        where, rate, method, seed = name.split("/")
        row = {"setting": where, "arm": rate, "paradigm": method.replace("_", " "), "seed": int(seed)}
        loss_s = seconds(row["paradigm"])
        rows.append({**row, "loss_s": loss_s, "loss_at_least_s": loss_s, "wait_share": 0.1 * loss_s})
    found = judged(long_iterations.claims(), pd.DataFrame(rows)).set_index("claim")
    where = f"{long_iterations.CLUSTERS['stalls']}, momentum 0.9"
    assert found["verdict"][f"{where}: k-sync 6 + batches sooner than BSP with batches"] == "holds"
    assert found["verdict"][f"{where}: k-sync 7 + batches sooner than BSP with batches"] == "does not hold"
    assert found["mean"][f"{where}: BSP + batches by gru: its time / that by smoothing"] == pytest.approx(0.75)
    assert found["mean"][f"{where}: BSP + batches by gru: waiting above that by smoothing"] == pytest.approx(-5)


# ---- all of it, small ----


def test_a_second_call_simulates_nothing_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "SEEDS", (1,))
    monkeypatch.setattr(first_k, "RATED", ("BSP", "ASP"))
    every = first_k.jobs

    def few(seeds, length):
        """As many as the figures need."""
        shown = {(where, "plain", method) for where in first_k.UNEVEN for method in ("BSP", "ASP")}
        shown |= {(task, "published", method) for task in first_k.TASKS for method in first_k.FRONTIER}
        names = {first_k.name_of(*run, SEED) for run in (*shown, ("homogeneous", "plain", "BSP"))}
        return {name: job for name, job in every(seeds, length).items() if name in names}

    monkeypatch.setattr(first_k, "jobs", few)
    console = Console(quiet=True)
    first = first_k.reproduce(tmp_path, 1, 1, console, length=1 / 50)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for draw in ("draw_times", "draw_frontier"):
        monkeypatch.setattr(first_k, draw, lambda *_: None)
    second = first_k.reproduce(tmp_path, 1, 1, console, length=1 / 50)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    pd.testing.assert_frame_equal(first, second)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"k-sync-times.png", "k-sync-frontier.csv", "claims.csv", "results.csv"} <= names
