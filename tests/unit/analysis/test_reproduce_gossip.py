"""The reproduction about gossip: its jobs and its stragglers are what they claim to be, and so are its verdicts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from reproductions import gossip, gossip_variants, relabelled, tuning
from reproductions.claims import judged


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return gossip.jobs(1, tmp_path_factory.mktemp("times"))


# ---- jobs ----


def test_all_methods_meet_the_same_numbers_of_workers_steps_and_stragglers(jobs):
    for cluster in ("even", "stragglers"):
        for step, lr in (("large", 0.2), ("medium", 0.05), ("small", 0.01)):
            for method in ("all-reduce", "EASGD", "pull", "push"):
                for workers in (4, 8, 16, 32, 64, 128):
                    job = jobs[f"{cluster}-{workers}/{step}/{method}/{gossip.FIRST_SEED}"]
                    assert (job.cluster.workers, job.optimizer.lr, job.workload.batch_size) == (workers, lr, 16)
                    assert job.optimizer.options == {"momentum": 0.9, "nesterov": True}
                    assert job.cluster.compute.model == ("lognormal" if cluster == "even" else "table")


def test_the_perceptron_takes_as_long_to_travel_as_a_resnet(jobs):
    torch.manual_seed(0)
    size = sum(p.numel() for p in relabelled.perceptron(0.2).model.parameters())
    assert size == gossip.PARAMETERS
    learning, travelling = (
        jobs[f"{where}/push/{gossip.FIRST_SEED}"] for where in ("even-8/large", "10 Gbit per s-8/timing")
    )
    bits = 32 * size, 32 * travelling.workload.parameters
    rates = (1e9 * job.cluster.network.bandwidth_gbit for job in (learning, travelling))
    small_s, large_s = (n / rate for n, rate in zip(bits, rates, strict=True))
    assert small_s == pytest.approx(large_s) == pytest.approx(0.0374, abs=1e-4)


def test_every_fourth_worker_sleeps_up_to_300_ms(tmp_path):
    path = gossip.table_of(tmp_path, 8, 1)
    gossip.write_times(path, 8, 1)
    seconds = pd.read_csv(path).pivot(index="worker", columns="iteration", values="seconds")
    assert seconds.shape == (8, gossip.ROWS)
    median = seconds.median(axis=1)
    assert median[[0, 4]].between(0.25, 0.3).all() and median.drop([0, 4]).between(0.12, 0.13).all()
    written, at_ns = path.read_bytes(), path.stat().st_mtime_ns
    gossip.write_times(path, 8, 1)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (written, at_ns)


def test_a_fifth_of_the_labels_is_drawn_anew_at_every_read():
    torch.manual_seed(0)
    workload = relabelled.perceptron(0.2)
    x, y = workload.train[:64]
    losses = {workload.loss(workload.model, x, y).item() for _ in range(5)}
    assert len(losses) == 5
    assert workload.evaluate(workload.model) == workload.evaluate(workload.model)


# ---- claims ----


def every_run(number):
    """Results of all the runs there are; number(cluster, workers, arm, method) gives seconds, accuracy, samples/s."""
    rows = []
    for workers in gossip.WORKERS:
        for cluster in gossip.CLUSTERS:
            for arm in gossip.STEPS:
                rows += [(f"{cluster}-{workers}", arm, m, *number(cluster, workers, arm, m)) for m in gossip.PARADIGMS]
        for link in gossip.LINKS:
            methods = [*gossip.PARADIGMS, *gossip.SERVER]
            rows += [(f"{link}-{workers}", "timing", m, *number("even", workers, "timing", m)) for m in methods]
    for setting in gossip.TUNED:
        cluster, workers = setting.split("-")
        rows += [(setting, "tuned", m, *number(cluster, int(workers), "tuned", m)) for m in gossip.RATED]
    for method in ("all-reduce", "EASGD", *gossip.FIXED):
        rows.append((f"free-{gossip.LIMIT}", "medium", method, *number("even", gossip.LIMIT, "medium", method)))
    frame = pd.DataFrame(rows, columns=["setting", "arm", "paradigm", "target_s", "accuracy", "samples_per_s"])
    return frame.assign(seed=1, target_at_least_s=frame["target_s"].fillna(99.0))


def holding(frame):
    return set(judged(gossip.claims(), frame).query("verdict == 'holds'")["claim"])


def test_were_it_as_published_every_claim_would_hold():
    def number(cluster, workers, arm, method):
        waits, served = method == "all-reduce", method in ("EASGD", "server")
        seconds = 10.0 if waits else (5.0 if workers <= 32 else np.nan)
        if arm == "small" and method == "EASGD":
            seconds = 20.0 if workers <= 32 else np.nan
        if arm == "small" and method in ("pull", "push"):
            seconds = 12.0
        accuracy = 0.98 if waits or method in gossip.FIXED else 0.975 - workers / 1e4
        samples_per_s = min(workers, 32 if served else 128) * (0.5 if waits and cluster == "stragglers" else 1.0)
        return seconds, accuracy, samples_per_s

    assert holding(every_run(number)) == {claim.says for claim in gossip.claims()}


def test_who_never_gets_there_is_later_than_who_does_and_sooner_than_nobody():
    def number(cluster, workers, arm, method):
        return (10.0 if method == "all-reduce" else np.nan), 0.9, 1.0

    held = holding(every_run(number))
    assert "large step, without stragglers, 128 workers: all-reduce sooner than gossip" in held
    assert "128 workers, without stragglers, each with its own best step: all-reduce sooner than pull" in held
    assert not any("sooner than EASGD" in says and "all-reduce" not in says for says in held)


# ---- all of it, small ----


def test_a_second_call_simulates_nothing_and_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(gossip, "WORKERS", (2,))
    monkeypatch.setattr(gossip, "LIMIT", 2)
    monkeypatch.setattr(gossip, "STEPS", {"large": 0.2, "medium": 0.05})
    monkeypatch.setattr(gossip, "TUNED", ("even-2",))
    monkeypatch.setattr(tuning, "FACTORS", (1.0,))
    console = Console(quiet=True)
    first = gossip.reproduce(tmp_path, 1, 1, console, length=1 / 10)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    for draw in ("draw_times", "draw_errors", "draw_throughput"):
        monkeypatch.setattr(gossip, draw, lambda *_: None)
    second = gossip.reproduce(tmp_path, 1, 1, console, length=1 / 10)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    pd.testing.assert_frame_equal(first, second)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"gossip-times.png", "gossip-errors.csv", "gossip-throughput.svg", "claims.csv", "results.csv"} <= names
    results = pd.read_csv(tmp_path / "results.csv")
    assert set(results["arm"]) == {"large", "medium", "tuned", "timing"}
    assert set(results["paradigm"]) == {"all-reduce", "EASGD", "EASGD-fixed", "pull", "push", "server"}
    assert results["samples_per_s"].notna().all()


# ---- variants ----


def test_variants_differ_in_one_option_and_share_the_papers_batch_and_decays(tmp_path):
    made = gossip_variants.jobs(1, tmp_path)
    assert len(made) == 2 * 2 * len(gossip_variants.METHODS)
    for name, job in made.items():
        setting, _, method, _ = name.split("/")
        workers = int(setting.split("-")[-1])
        assert job.workload.batch_size * workers == max(256, 16 * workers)
        assert job.optimizer.schedule.milestones == (49_152, 98_304) and job.optimizer.schedule.gamma == 0.1
        if method == "synchronous_push":
            assert job.paradigm.synchronous and job.paradigm.mode == "push"
            asynchronous = made[name.replace("synchronous_push", "push")]
            assert replace(job.paradigm, synchronous=False) == asynchronous.paradigm


def test_verdicts_on_variants_follow_the_times():
    seeds = range(5)
    rows = [
        {
            "setting": f"{cluster}-{workers}",
            "arm": gossip_variants.ARM,
            "paradigm": method,
            "seed": seed,
            "workers": workers,
        }
        | {"target_s": (2.0 if method == "all-reduce" else 1.0) + 0.01 * seed, "accuracy": 0.9}
        for cluster in gossip.CLUSTERS
        for workers in gossip_variants.WORKERS
        for method in gossip_variants.METHODS
        for seed in seeds
    ]
    rows += [row | {"arm": "tuned", "target_s": 1.0} for row in rows if row["workers"] == 32]
    frame = pd.DataFrame(rows).assign(target_at_least_s=lambda runs: runs["target_s"])
    found = judged(gossip_variants.claims(), frame).set_index("claim")["verdict"]
    assert found["8 workers, with stragglers: pull sooner than all-reduce"] == "holds"
    assert found["8 workers, with stragglers: all-reduce's accuracy at the end above that of pull"] == "does not hold"
    assert found["32 workers, with stragglers: pull sooner than all-reduce"] == "holds"
    own_rates = "32 workers, with stragglers, each with its own best rate: pull sooner than all-reduce"
    assert found[own_rates] == "does not hold"


@pytest.mark.parametrize(("module", "step"), [(gossip, 0.05), (gossip_variants, 0.2)])
def test_rates_are_chosen_alike_on_seeds_of_their_own(module, step, tmp_path, monkeypatch):
    found = {}

    def tuned(setting, methods, make, measure, columns, seeds, out, *_, tuning_seeds):
        found[setting] = {(m, f): make(m, f, 1).optimizer.lr for m in methods for f in (0.25, 4.0)}
        assert not set(seeds) & set(tuning_seeds)
        return pd.DataFrame()

    monkeypatch.setattr(module, "tuned", tuned)
    for setting in module.TUNED:
        workers = int(setting.split("-")[1])
        gossip.write_times(gossip.table_of(tmp_path / "times", workers, 1), workers, 1)
        module.tuned_runs(setting, tmp_path, 5, 1, Console(quiet=True), 1.0)
    assert found.keys() == set(module.TUNED) and {"even-32", "stragglers-32"} <= found.keys()
    expected = {(m, f): pytest.approx(step * f) for m in ("all-reduce", "EASGD", "pull") for f in (0.25, 4.0)}
    assert all(rates == expected for rates in found.values())
