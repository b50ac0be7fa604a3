"""Paradigms on a harder problem: a residual network with BatchNorm that learns drawn images, with decaying rates.

The rates of each method are chosen by the loss at the end on validation images, and the accuracies that are reported
are those of the final model on 200,000 test images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn

from hpcsync.figures import plotting
from hpcsync.run_dir import layout
from hpcsync.trace.reader import load
from hpcsync.workloads.registry import EVALUATED_AT_ONCE
from reproductions import headline
from reproductions.final_model import remembered, sampling_error
from reproductions.headline import PAIRS, Problem
from reproductions.residual_network import TESTED, all_test_images
from reproductions.tuning import stem

SAMPLES = 32_768  # a guess: 2 passes over the training images, 256 updates of BSP


def correct(folder: Path) -> np.ndarray:
    """Return for each test image whether the final model of a run classifies it correctly, and remember it."""
    return np.unpackbits(remembered(folder, _correct, -(-TESTED // 8)), count=TESTED).astype(bool)


def _correct(model: nn.Module) -> np.ndarray:
    found = [
        model(x).argmax(1) == y
        for images, classes in all_test_images()
        for x, y in zip(images.split(EVALUATED_AT_ONCE), classes.split(EVALUATED_AT_ONCE), strict=True)
    ]
    return np.packbits(torch.cat(found).numpy())


def test_accuracy(folder: Path) -> float:
    """Return the accuracy of the final model of a run on the test images."""
    return float(correct(folder).mean())


# He et al. (2016, section 4.2) train with a batch of 128, which are 8 workers' of 16, a rate of 0.1 that is divided by
# 10 after a half and three quarters of the iterations, momentum 0.9 and this weight decay. The other settings are
# guesses.
PROBLEM = Problem(
    name="images",
    methods=headline.methods(loss=0.5),
    workload={
        "name": "reproductions.residual_network:pictures",
        "batch_size": 16,
        "options": {"samples": SAMPLES // 2, "width": 8},
    },
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    samples=SAMPLES,
    decays=(SAMPLES // 2, 3 * SAMPLES // 4),
    losses=(0.6, 0.5, 0.4),
    evaluations=32,
    evaluation={"buffers": "recompute"},
    factors=(1.0, 2.0, 4.0, 8.0),
    tuned_by=("loss",),
    pairs=PAIRS,
    test=test_accuracy,
)


COLOURS = {method: plotting.PARADIGM_COLOURS[table["name"]] for method, (table, _) in PROBLEM.methods.items()}


def draw(results: pd.DataFrame, runs: Path, folder: Path) -> None:
    """Draw the loss against time, means over the seeds, and the accuracy on the test images, a mark for each seed."""
    figure, axes = plotting.panels(1, 2, height=4.4, width_ratios=(3, 2))
    methods = [method for method in PROBLEM.methods if method in set(results["paradigm"])]
    curves = []
    for method in methods:
        seeds = results["seed"][results["paradigm"] == method]
        of_method = runs / PROBLEM.name / headline.ARM / stem(method)
        each = [load(of_method / str(seed) / layout.TRACE).frame("evaluations") for seed in seeds]
        mean = pd.concat(each)[["now_s", "loss"]].groupby(level=0).mean()  # the n-th evaluations of all seeds
        look = plotting.look(len(curves), COLOURS[method])
        axes[0, 0].plot(mean["now_s"], mean["loss"], label=method, lw=1.1, **look)
        curves.append(mean.assign(method=method))
    axes[0, 0].set(xlabel="virtual time (s)", ylabel="loss on validation images", xscale="log", yscale="log")
    ticks = (0.3, 0.4, 0.6, 1.0, 2.0)
    axes[0, 0].set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes[0, 0].yaxis.set_minor_formatter("")
    axes[0, 0].xaxis.set_major_formatter("{x:g}")
    for at, method in enumerate(reversed(methods)):
        accuracies = results["accuracy"][results["paradigm"] == method]
        axes[0, 1].plot(accuracies, [at] * len(accuracies), "o", ms=3.5, mew=0.7, mfc="none", color=COLOURS[method])
        axes[0, 1].plot(accuracies.mean(), at, "|", ms=9, color=COLOURS[method])
    axes[0, 1].set_yticks(range(len(methods)), reversed(methods))
    axes[0, 1].tick_params(axis="y", length=0)
    axes[0, 1].set(xlabel="accuracy on test images at the end")
    axes[0, 1].xaxis.set_major_formatter(plotting.percent)
    for axis in axes[0]:
        axis.set_axisbelow(True)
        axis.grid(lw=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    plotting.save(figure, pd.concat(curves).round(4), folder, "images")


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate and test what is missing in the folder, write results, claims and the figure there, print the claims."""
    verdicts = headline.reproduce(PROBLEM, out, seeds, processes, console, length)
    results = pd.read_csv(out / "results.csv")
    told = sampling_error(results, out / "runs" / PROBLEM.name / headline.ARM, correct, np.ones(TESTED))
    told.to_csv(out / "sampling.csv", index=False)
    console.print(f"Half a 95 % interval from the choice of test images: at most {told['points'].max():.2f} points")
    draw(results, out / "runs", out)
    return verdicts
