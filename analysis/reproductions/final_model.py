"""What is found of the final models of runs, remembered in the runs' folders, and how well test data tell it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from torch import nn

from hpcsync.config.job import Job
from hpcsync.run_dir import layout
from hpcsync.system.atomic_files import whole
from hpcsync.workloads.registry import build
from reproductions.tuning import stem

CORRECT = "test-correct.npy"  # in a run's folder: what the final model has right of the test data


def remembered(folder: Path, find: Callable[[nn.Module], np.ndarray], length: int) -> np.ndarray:
    """Return what `find` returns of the final model of a finished run, or what it has returned before.

    Parameters
    ----------
    folder
        Folder of a run that has kept its weights.
    find
        Called with the model in evaluation mode, without gradients.
    length
        Of what it returns; what is remembered with another one was found with other test data.
    """
    path, weights = folder / CORRECT, folder / layout.WEIGHTS
    known = path.exists() and path.stat().st_mtime_ns >= weights.stat().st_mtime_ns  # not of an earlier run there
    if not known or len(np.load(path)) != length:
        torch.set_num_threads(1)
        model = build(Job.from_toml((folder / layout.JOB).read_text(encoding="utf-8"))).model
        model.load_state_dict(load_file(weights))
        model.eval()
        with torch.no_grad():
            found = find(model)
        with whole(path) as unfinished, unfinished.open("wb") as file:
            np.save(file, found)
    return np.load(path)


def sampling_error(
    results: pd.DataFrame, runs: Path, find: Callable[[Path], np.ndarray], sizes: np.ndarray
) -> pd.DataFrame:
    """Return how well test data tell the accuracies: half a 95 % interval of each method's difference from BSP.

    The parts of the test data are the sample here, and the seeds are given: all methods are tested on the same parts,
    and a part's difference is the mean over the seeds. What seeds differ by is in the intervals of the claims.

    Parameters
    ----------
    results
        A row per run, with `paradigm` and `seed`; one paradigm is "BSP".
    runs
        Folder of METHOD/SEED.
    find
        Returns for the folder of a run how much of each part is correct.
    sizes
        How much each part has.
    """
    correct = {
        method: np.mean([find(runs / stem(method) / str(seed)) for seed in seeds], axis=0)
        for method, seeds in results.groupby("paradigm")["seed"]
    }
    n, size = len(sizes), sizes.sum()
    rows = []
    for method, found in correct.items():
        difference = correct["BSP"] - found
        rest = difference - sizes * difference.sum() / size
        rows.append({"paradigm": method, "points": 196 * np.sqrt(n / (n - 1) * (rest**2).sum()) / size})
    return pd.DataFrame(rows)
