"""Paradigms on a harder problem: a transformer that learns real text, with momentum and decaying rates.

The other reproductions learn digits, on which staleness costs little. The rates of each method are chosen by its times
to losses on held-out text, and the accuracies that are reported are those of the final model on all files that no run
has seen. All settings here are guesses.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn

from hpcsync.workloads.registry import EVALUATED_AT_ONCE
from hpcsync.workloads.text import encode, is_held_out, source_files, windows
from reproductions import headline
from reproductions.final_model import remembered, sampling_error
from reproductions.headline import PAIRS, Problem

SAMPLES = 24_000  # sequences of 32 characters; a seventh of the text
CONTEXT = 32

# Packages of the standard library that the workload does not train with, so that there are files enough to test.
PACKAGES = ("ctypes", "html", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml", "xmlrpc")


def test_files(root: Path) -> list[str]:
    """Return the files of the standard library that are tested: those held out, and those of `PACKAGES`."""
    others = [path.relative_to(root).as_posix() for package in PACKAGES for path in (root / package).rglob("*.py")]
    return sorted(name for name in (*filter(is_held_out, source_files(root)), *others))


@functools.cache
def test_sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the sequences x and y of each test file that has any; together about 3.2 million characters."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [encode((root / name).read_text(encoding="utf-8", errors="replace")) for name in test_files(root)]
    return [windows(text, CONTEXT)[:] for text in texts if len(text) > CONTEXT]


def sizes() -> np.ndarray:
    """Return the number of characters that are predicted in each test file."""
    return np.array([y.numel() for _, y in test_sequences()])


def correct(folder: Path) -> np.ndarray:
    """Return how many characters of each test file the final model of a run predicts, and remember it."""
    return remembered(folder, _correct, len(test_sequences()))


def _correct(model: nn.Module) -> np.ndarray:
    def right(x: torch.Tensor, y: torch.Tensor) -> int:
        return int((model(x).argmax(2) == y.long()).sum())

    parts = [(x.split(EVALUATED_AT_ONCE), y.split(EVALUATED_AT_ONCE)) for x, y in test_sequences()]
    return np.array([sum(map(right, *each)) for each in parts])


def test_accuracy(folder: Path) -> float:
    """Return the share of the test files' characters that the final model of a run predicts."""
    return float(correct(folder).sum() / sizes().sum())


PROBLEM = Problem(
    name="text",
    methods=headline.methods(loss=2.4),
    workload={"name": "text", "batch_size": 8, "context": CONTEXT, "layers": 2, "width": 64, "heads": 4},
    optimizer={"name": "sgd", "lr": 0.2, "momentum": 0.9},
    samples=SAMPLES,
    decays=(SAMPLES // 2, 3 * SAMPLES // 4),
    losses=(2.5, 2.4, 2.3),
    evaluations=40,
    factors=(0.5, 1.0, 2.0, 4.0),
    pairs=PAIRS,
    test=test_accuracy,
)


def reproduce(out: Path, seeds: int, processes: int, console: Console, length: float = 1.0) -> pd.DataFrame:
    """Simulate and test what is missing in the folder, write results and claims there, print the claims."""
    verdicts = headline.reproduce(PROBLEM, out, seeds, processes, console, length)
    results = pd.read_csv(out / "results.csv")
    told = sampling_error(results, out / "runs" / PROBLEM.name / headline.ARM, correct, sizes())
    told.to_csv(out / "sampling.csv", index=False)
    console.print(f"Half a 95 % interval from the choice of test files: at most {told['points'].max():.2f} points")
    return verdicts
