"""Measure the updates of a parameter server on this host: python update_speed.py OUT.json BYTES

The result is the throughput in 10^9 bytes per second of updates by one contribution of BYTES: the median of several.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from hpcsync.training.optimizers import OptimizerSpec
from hpcsync.training.parameter_store import Store, n_buffers, row_size
from hpcsync.training.update_rules import Descent

TIMES = 15
SCRATCH = 64_000_000  # elements: more than any cache holds


def update_s(size: int) -> float:
    torch.set_num_threads(1)
    buffers, slots = (torch.zeros(n, row_size(size)) for n in (n_buffers(1), 1))
    store = Store(buffers, slots, np.zeros(2, np.int64), Descent(OptimizerSpec("sgd", 0.1).on_server), size)
    found, scratch = [], torch.zeros(SCRATCH)
    for _ in range(TIMES):
        slots.fill_(1.0)
        scratch.add_(1.0)  # a push and the reads before it leave nothing in the cache
        begin_s = time.perf_counter()
        store.apply([0], 0.1)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def main(out: Path, size_bytes: Annotated[int, typer.Argument(min=4)]) -> None:
    size = size_bytes // 4
    out.write_text(json.dumps({"update_gbytes_per_s": 4e-9 * size / update_s(size)}))


if __name__ == "__main__":
    typer.run(main)
