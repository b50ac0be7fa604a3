"""The reproductions on text and images: methods share problem and cluster, verdicts say what results say."""

import math
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from hpcsync.run_dir import layout
from hpcsync.workloads.registry import build
from hpcsync.workloads.text import is_held_out, source_files
from reproductions import first_k, headline, images, text
from reproductions.claims import judged
from reproductions.final_model import CORRECT, sampling_error
from reproductions.simulating import simulate_all


@pytest.mark.parametrize("problem", [text.PROBLEM, images.PROBLEM], ids=lambda problem: problem.name)
def test_methods_differ_in_paradigm_batches_and_rate_alone(problem):
    made = {method: headline.job(problem, method, 0.5, 7) for method in problem.methods}
    one = made["BSP"]
    for method, job in made.items():
        assert (job.workload, job.cluster.compute, job.stop, job.optimizer.schedule) == (
            one.workload,
            one.cluster.compute,
            one.stop,
            one.optimizer.schedule,
        )
        assert job.optimizer.lr == 0.5 * problem.optimizer["lr"]
        assert (job.batches.policy == "equal-finish") == (method == "BSP + batches")


@pytest.mark.parametrize("problem", [text.PROBLEM, images.PROBLEM], ids=lambda problem: problem.name)
def test_the_rate_is_shared_where_the_optimizer_is_the_servers(problem):
    for method in problem.methods:
        job = headline.job(problem, method, 1.0, 7)
        assert (job.optimizer.async_lr_scale == "1/workers") == (not job.paradigm.steps_on_workers), method


def test_text_has_the_headline_methods_of_all_lines_of_work():
    jobs = {method: headline.job(text.PROBLEM, method, 1.0, 7).paradigm for method in text.PROBLEM.methods}
    assert (jobs["DSSP"].mode, jobs["DSSP bounded"].mode) == ("paper", "bounded")
    assert (jobs["k-sync 6"].k, jobs["ADSP"].loss, jobs["ADSP"].commits) == (6, "evaluation", None)
    assert jobs["ADSP"].interval_min_s > headline.FASTEST_S * max(first_k.SLOWNESS), "a step of the slowest worker"
    assert {method for pair in text.PROBLEM.pairs for method in pair} <= set(jobs)


def test_verdicts_follow_the_times():
    """ASP, SSP and DSSP never arrive in runs of 50 s."""
    times_s = {"gossip": 5.0, **dict.fromkeys(("ASP", "SSP", "DSSP"), math.nan)}
    rows = [
        {"setting": "text", "arm": headline.ARM, "paradigm": method, "seed": seed, "accuracy": 0.4 + 0.01 * seed}
        | {"loss_s": time_s, "loss_at_least_s": 50.0 if math.isnan(time_s) else time_s}
        for method in text.PROBLEM.methods
        for time_s in [times_s.get(method, 10.0)]
        for seed in (7, 8, 9)
    ]
    found = judged(headline.claims(text.PROBLEM), pd.DataFrame(rows)).set_index("claim")["verdict"]
    assert found["gossip sooner than BSP: BSP's time / its own"] == "holds"
    assert found["k-sync sooner than BSP: BSP's time / its own"] == "does not hold"
    assert found["ASP sooner than BSP: BSP's time / its own"] == "does not hold", "it never arrives"
    assert found["gossip sooner than ASP: ASP's time / its own"] == "holds", "ASP never arrives"
    assert found["DSSP sooner than ASP: ASP's time / its own"] == "cannot be told", "neither arrives"
    assert found["DSSP bounded sooner than SSP: SSP's time / its own"] == "holds"
    assert found["ASHL sooner than ADSP: ADSP's time / its own"] == "does not hold", "they are equal"
    assert found["BSP's accuracy at the end above that of SSP"] == "does not hold"


@pytest.fixture
def few(monkeypatch):
    """Test sequences of three files."""
    files = text.test_sequences()[:3]
    monkeypatch.setattr(text, "test_sequences", lambda: files)
    return files


def test_a_run_is_measured_and_its_final_model_is_tested_once(tmp_path, few):
    problem = replace(text.PROBLEM, losses=(5.0, 4.5), evaluations=10)
    job = headline.job(problem, "ASP", 0.125, 7, length=1 / 60)
    simulate_all({"text/tuned/ASP/7": job}, tmp_path, 1, Console(quiet=True), keep_weights=True)
    folder = tmp_path / "text/tuned/ASP/7"
    found = headline.measure(problem, folder)
    assert (found["paradigm"], found["seed"]) == ("ASP", 7)
    assert 0 < found["loss_s"] < found["duration_s"] and 0 < found["loss"] < 5.0
    model = build(job).model.eval()
    model.load_state_dict(load_file(folder / layout.WEIGHTS))
    with torch.no_grad():
        by_hand = [sum(int((model(x[None]).argmax(2) == y).sum()) for x, y in zip(*file, strict=True)) for file in few]
    assert text.correct(folder).tolist() == by_hand
    assert found["accuracy"] == sum(by_hand) / text.sizes().sum() == pytest.approx(0.28, abs=0.1)
    written = (folder / CORRECT).stat().st_mtime_ns
    assert headline.measure(problem, folder) == found and (folder / CORRECT).stat().st_mtime_ns == written

    always = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    always["logits.bias"][5] = 1.0  # another run in the same folder, which predicts one character
    save_file(always, folder / layout.WEIGHTS)
    by_hand = [int((y == 5).sum()) for _, y in few]
    assert text.correct(folder).tolist() == by_hand
    np.save(folder / CORRECT, np.array([*by_hand, 7]))  # found when there was one test file more
    assert text.correct(folder).tolist() == by_hand


def test_no_run_trains_with_a_test_file():
    root = Path(sysconfig.get_path("stdlib"))
    tested, all_files = set(text.test_files(root)), source_files(root)
    trained = {name for name in all_files if not is_held_out(name)}
    assert tested and trained and not tested & trained
    assert len(tested & set(all_files)) == len(all_files) - len(trained), "all that are held out"
    assert text.sizes().sum() > 2e6


def test_the_error_of_the_choice_of_files_grows_with_what_they_differ_by(tmp_path):
    """Two files, of which the larger one counts more; by hand for a ratio of sums."""
    right = {("BSP", 7): [60, 30], ("ASP", 7): [50, 20], ("SSP", 7): [54, 27]}
    results = pd.DataFrame([{"paradigm": method, "seed": seed} for method, seed in right])
    points = sampling_error(
        results, tmp_path, lambda run: np.array(right[run.parent.name, int(run.name)]), np.array([100, 50])
    ).set_index("paradigm")["points"]
    assert points["BSP"] == 0.0
    assert points["SSP"] == pytest.approx(0.0, abs=1e-9), "6 of 100 and 3 of 50"
    rest = np.array([10 - 100 * 20 / 150, 10 - 50 * 20 / 150])
    assert points["ASP"] == pytest.approx(196 * np.sqrt(2 * (rest**2).sum()) / 150)
