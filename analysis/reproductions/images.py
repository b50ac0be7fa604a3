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
from safetensors.torch import load_file

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.workloads.registry import EVALUATED_AT_ONCE, build
from reproductions import headline
from reproductions.headline import METHODS, Problem
from reproductions.residual_network import TESTED, all_test_images

SAMPLES = 32_768  # a guess: 2 passes over the training images, 256 updates of BSP
CORRECT = "test-correct.npy"  # in a run's folder: a bit for each test image

OTHERS = {
    "k-sync 6": {"name": "k-sync", "k": 6},
    "ASHL": {"name": "ashl", "steps_coarse": 8, "warmup": 2, "profiled": 8, "loss_preset": 0.5},
}


def correct(folder: Path) -> np.ndarray:
    """Return for each test image whether the final model of a run classifies it correctly, and remember it."""
    path, weights = folder / CORRECT, folder / layout.WEIGHTS
    if not path.exists() or path.stat().st_mtime_ns < weights.stat().st_mtime_ns:  # those of an earlier run there
        torch.set_num_threads(1)
        model = build(Job.from_toml((folder / layout.JOB).read_text(encoding="utf-8"))).model
        model.load_state_dict(load_file(weights))
        model.eval()
        with torch.no_grad():
            found = [
                model(x).argmax(1) == y
                for images, classes in all_test_images()
                for x, y in zip(images.split(EVALUATED_AT_ONCE), classes.split(EVALUATED_AT_ONCE), strict=True)
            ]
        np.save(path, np.packbits(torch.cat(found).numpy()))
    return np.unpackbits(np.load(path), count=TESTED).astype(bool)


def test_accuracy(folder: Path) -> float:
    """Return the accuracy of the final model of a run on the test images."""
    return float(correct(folder).mean())


# He et al. (2016, section 4.2) train with a batch of 128, which are 8 workers' of 16, a rate of 0.1 that is divided by
# 10 after a half and three quarters of the iterations, momentum 0.9 and this weight decay. The other settings are
# guesses.
PROBLEM = Problem(
    name="images",
    methods={**METHODS, **{name: (paradigm, None) for name, paradigm in OTHERS.items()}},
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
    factors=(1.0, 2.0, 4.0),
    tuned_by=("loss",),
    pairs=(("DSSP", "SSP"), ("DSSP", "ASP"), ("BSP + batches", "ASP"), ("gossip", "ASP"), ("k-sync", "k-sync 6")),
    test=test_accuracy,
)


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate and test what is missing in the folder, write results and claims there, print the claims."""
    return headline.reproduce(PROBLEM, out, seeds, processes, console, length)
