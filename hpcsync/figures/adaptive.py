"""What was chosen as the run went: how many contributions an update waits for (k), and the workers' batch sizes.

k of all traces that have one, as steps; then, for every trace whose batches were given out, the size of each worker's.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import MaxNLocator

from hpcsync.config.paradigms import FirstKOptions
from hpcsync.core.batch_sizes import sizes_at_first
from hpcsync.figures import plotting
from hpcsync.figures.plotting import Drawing
from hpcsync.trace.reader import Trace, TraceError


def draw(traces: list[Trace], workers: int = 8) -> list[Drawing]:
    names, looks = plotting.labels(traces), plotting.styles(traces)
    has_k, gives_out = ([trace for trace in traces if has(trace)] for has in (has_own_k, gives_batches_out))
    if not has_k and not gives_out:
        raise TraceError(f"{traces[0].path}: nothing to draw: nothing is chosen in this run, {names[0]}")
    n_panels = bool(has_k) + len(gives_out)
    figure, axes = plotting.panels(n_panels, height=0.8 + 1.7 * n_panels, sharex=True)
    frames, rows = [], iter(axes[:, 0])
    if has_k:
        axis = next(rows)
        for trace, name, look in zip(traces, names, looks, strict=True):
            if has_own_k(trace):
                steps = steps_of_k(trace)
                axis.step(steps["now_s"], steps["k"], where="post", label=name, **look)
                frames.append(steps.assign(trace=name))
        axis.set(ylabel="k", ylim=(0.5, max(trace.n_workers for trace in has_k) + 0.5))
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1, ncols=3)
    for trace in gives_out:
        axis, name = next(rows), names[traces.index(trace)]
        sizes = steps_of_batches(trace)
        shown = plotting.pick(sorted(sizes["worker"].unique()), workers)
        for worker in shown:
            own = sizes[sizes["worker"] == worker]
            axis.step(own["now_s"], own["batch_size"], where="post", lw=1, label=f"worker {worker}")
        axis.set(ylabel="samples", ylim=(0, None))
        axis.set_title(f"batch sizes, {name}")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        frames.append(sizes[sizes["worker"].isin(shown)].assign(trace=name))
    for axis in axes[:, 0]:
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes[-1, 0].set(xlabel="time (s)", xlim=(0, None))
    frame = pd.concat(frames)
    whole = [column for column in ("k", "worker", "batch_size") if column in frame]
    return [Drawing(figure, frame.astype(dict.fromkeys(whole, "Int64")))]


def has_own_k(trace: Trace) -> bool:
    return isinstance(trace.job.paradigm, FirstKOptions)


def gives_batches_out(trace: Trace) -> bool:
    return trace.job.batches.policy != "equal"


def steps_of_k(trace: Trace) -> pd.DataFrame:
    """now_s, k: from then on; the last row is the end of the run, at its last update."""
    decisions = of_controller(trace, "k")
    paradigm = trace.job.paradigm
    assert isinstance(paradigm, FirstKOptions)
    k = [paradigm.k_at_first(trace.n_workers), *decisions["chosen"].astype(int)]
    return pd.DataFrame({"now_s": [0.0, *decisions["now_s"], _end_s(trace)], "k": [*k, k[-1]]})


def steps_of_batches(trace: Trace) -> pd.DataFrame:
    """now_s, worker, batch_size: from then on, those given out; the last row of each worker is the end of the run."""
    chosen = of_controller(trace, "batches")[["now_s", "worker", "chosen"]].rename(columns={"chosen": "batch_size"})
    at_first = sizes_at_first(trace.job)
    start = pd.DataFrame({"now_s": 0.0, "worker": range(trace.n_workers), "batch_size": at_first})
    sizes = pd.concat([start, chosen.astype({"batch_size": int})])
    end = sizes.groupby("worker").tail(1).assign(now_s=_end_s(trace))
    return pd.concat([sizes, end], ignore_index=True)


def of_controller(trace: Trace, name: str) -> pd.DataFrame:
    decisions = trace.frame("decisions")
    return decisions[decisions["controller"] == name]


def _end_s(trace: Trace) -> float:
    updates = trace.tables["updates"]
    return float(updates["now_s"][-1]) if len(updates) else 0.0
