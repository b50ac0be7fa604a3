"""Stanza against parameter servers and all-reduce: ratio of samples per second for each model.

Wu, Xu, Li and Xiong (Stanza, arXiv 1812.10624) report 1.34 to 13.9 times the samples per second of a parameter server
for common models, on EC2 with Tesla V100s and 10 Gbit/s. Only their abstract and introduction could be read, so the
layouts, batches and models were chosen here. Every model is simulated with times measured on a V100, on 4 to 16 nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from rich.console import Console

from hpcsync.config.job import Job
from hpcsync.figures import plotting
from hpcsync.planning import stanza_planner
from hpcsync.planning.layer_groups import Groups
from hpcsync.planning.split_cost import Times
from hpcsync.planning.stanza_planner import Link, SplitProfile
from hpcsync.run_dir import layout as outputs
from hpcsync.trace.reader import load
from hpcsync.workloads import torchvision_models
from reproductions.claims import Claim, Of, conclude, of, ratio
from reproductions.simulating import simulate_all

# ---- what a V100 does: images a second of training, float32, one GPU ----

MXNET = "MXNet 1.2, EC2 p3.2xlarge (apache/mxnet, docs/faq/perf.md)"
PYTORCH = "PyTorch 0.3, EC2 p3, forward and backward, batch 16 (u39kun/deep-learning-benchmark, README.md)"
# Batches that fill the memory: TensorFlow, V100 32 GB (LambdaColdStorage/lambda-tensorflow-benchmark, tf-train-*.csv).
# VGG-19 was found on no V100: VGG-16's, as the two compare in tf_cnn_benchmarks at batch 32 on an RTX 2080
# (ggg17226/rtx2080-dl-benchmark, benchmark-tf.md).
VGG_19 = 108.83 / 126.27


class Speed(NamedTuple):
    """batch: of a worker, in the main runs. rate: images a second at that batch, or, of what was measured, at the
    nearest. fast: with batches that fill the memory."""

    batch: int
    rate: float
    source: str
    fast: float


SPEEDS = {
    "alexnet": Speed(128, 2919.02, MXNET, 5132),
    "vgg16": Speed(32, 16 / 0.0835, PYTORCH, 249),
    "vgg19": Speed(32, 16 / 0.0835 * VGG_19, f"{PYTORCH}, derived", 249 * VGG_19),
    "inception_v3": Speed(32, 214.48, MXNET, 273),
    "resnet50": Speed(32, 298.51, MXNET, 432),
    "resnet152": Speed(32, 16 / 0.1365, PYTORCH, 167),
}
TITLES = {
    "alexnet": "AlexNet",
    "vgg16": "VGG-16",
    "vgg19": "VGG-19",
    "inception_v3": "Inception-v3",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
}

# ---- what is run ----

GBIT, NODES, LATENCY_US = (10.0, 25.0), (4, 8, 10, 12, 16), 50.0
BASE = (10.0, 10)  # where things are varied
BATCHES = (8, 16, 32, 64, 128, 256, 512)
UPDATES = 6  # all of them alike
JITTER, JITTERED_UPDATES = 0.1, 60
FIRST_SEED = 1
PIECES = 4


class Point(NamedTuple):
    """arm: "main"; "jitter", times that vary; "fast", at the other rates; or "batch-B"."""

    model: str
    gbit: float
    nodes: int
    arm: str = "main"

    @property
    def setting(self) -> str:
        return setting_of(self.model, self.gbit, self.nodes)

    @property
    def batch(self) -> int:
        return int(self.arm.removeprefix("batch-")) if self.arm.startswith("batch-") else SPEEDS[self.model].batch

    @property
    def seconds(self) -> float:
        """Seconds of an iteration of the whole model, in proportion to the batch size."""
        speed = SPEEDS[self.model]
        return self.batch / (speed.fast if self.arm == "fast" else speed.rate)

    @property
    def links(self) -> Link:
        return Link(self.gbit * 1e9 / 8, 1e-6 * LATENCY_US)

    @property
    def profile(self) -> SplitProfile:
        shape = torchvision_models.shape(self.model)
        return SplitProfile(Times.of(self.seconds, shape.fc_share), shape, self.batch)

    @property
    def n_fc(self) -> int:
        """Number of fully-connected workers that the planner chooses."""
        return stanza_planner.choose(self.profile, self.links, self.nodes).best.n_fc


def setting_of(model: str, gbit: float, nodes: int) -> str:
    return f"{model}-{gbit:g}-{nodes}"


def points() -> list[Point]:
    found = []
    for model in SPEEDS:
        found += [Point(model, gbit, nodes) for gbit in GBIT for nodes in NODES]
        found += [Point(model, *BASE, arm) for arm in ("jitter", "fast", *(f"batch-{b}" for b in BATCHES))]
    return found


SERVER, BESIDE, SHARDS, RING, STANZA = "server", "server beside", "server in shards", "ring", "Stanza"


CLUSTER_KEYS = ("workers", "servers", "colocated")


def methods(point: Point) -> dict[str, dict[str, Any]]:
    """By name: the tables of paradigm and cluster that differ. Servers are some of the nodes, and more of them than
    half of the nodes cannot help: a worker's link is then narrower than theirs together."""
    found: dict[str, dict[str, Any]] = {}
    for servers in range(1, point.nodes // 2 + 1):
        found[f"{SERVER} {servers}"] = {"name": "bsp", "servers": servers, "workers": point.nodes - servers}
    if point.arm == "main" and (point.gbit, point.nodes) == BASE:
        found[BESIDE] = {"name": "bsp", "servers": 1, "workers": point.nodes}
    found[SHARDS] = {"name": "bsp", "servers": point.nodes, "workers": point.nodes, "colocated": True}
    found[RING] = {"name": "allreduce", "workers": point.nodes}
    chosen = point.n_fc
    for n_fc in sorted({1, chosen - 1, chosen, chosen + 1} & set(range(1, point.nodes))):
        found[f"{STANZA} {n_fc}"] = stanza(point, n_fc)
    found[f"{STANZA} {chosen}, {PIECES} pieces"] = stanza(point, chosen, PIECES)
    return found


def stanza(point: Point, n_fc: int, pieces: int = 1) -> dict[str, Any]:
    share = torchvision_models.shape(point.model).fc_share
    table = {"name": "stanza", "cut": "classifier", "fc_workers": n_fc, "fc_share": share, "micro_batches": pieces}
    return table | {"workers": point.nodes}


def jobs(seeds: int) -> dict[str, Job]:
    """Every run, by the name of its folder. Times are the same in every iteration, so that one run of each says all,
    but where they vary."""
    found = {}
    for point in points():
        varies = point.arm == "jitter"
        for seed in range(FIRST_SEED, FIRST_SEED + (seeds if varies else 1)):
            for name, method in methods(point).items():
                found[path_of(point.setting, point.arm, name, seed)] = job(point, name, method, seed)
    return found


def path_of(setting: str, arm: str, method: str, seed: int) -> str:
    return f"{setting}/{arm}/{method.replace(', ', '+').replace(' ', '_')}/{seed}"


def job(point: Point, name: str, method: dict[str, Any], seed: int) -> Job:
    shape = torchvision_models.shape(point.model)
    varies = point.arm == "jitter"
    compute = {"model": "lognormal", "jitter": JITTER} if varies else {"model": "constant"}
    table: dict[str, Any] = {
        "name": f"{point.setting}-{point.arm}-{name}".replace(", ", "-").replace(" ", "-"),
        "seed": seed,
        "workload": {
            "name": "timing",
            "batch_size": point.batch,
            "parameters": shape.conv_parameters + shape.fc_parameters,
            "classifier": shape.fc_parameters,
            "activations": shape.activations,
        },
        "optimizer": {"name": "sgd", "lr": 0.1},
        "stop": {"updates": JITTERED_UPDATES if varies else UPDATES},
        "paradigm": {key: value for key, value in method.items() if key not in CLUSTER_KEYS},
        "cluster": {key: value for key, value in method.items() if key in CLUSTER_KEYS}
        | {
            "compute": compute | {"seconds": point.seconds},
            "network": {"bandwidth_gbit": point.gbit, "latency_us": LATENCY_US},
        },
    }
    return Job.from_table(table)


# ---- what came of it ----


def measure(folder: Path, left_out: int = 0) -> dict[str, Any]:
    """The results of a run: from its first update to its last, without so many at the beginning."""
    trace = load(folder / outputs.TRACE)
    setting, arm, method, seed = folder.parts[-4:]
    updates = trace.tables["updates"][left_out:]
    rows = trace.tables["pushes" if trace.job.has_servers else "exchanges"]
    took_s = float(updates["now_s"][-1] - updates["now_s"][0])
    return {
        "setting": setting,
        "arm": arm,
        "paradigm": method.replace("+", ", ").replace("_", " "),
        "seed": int(seed),
        "iteration_s": took_s / (len(updates) - 1),
        "samples_per_s": float(updates["samples"][-1] - updates["samples"][0]) / took_s,
        "bytes": int(rows["wire_bytes"].sum()) // len(trace.tables["updates"]),
    }


SERVERS, CHOSEN, IN_PIECES = "servers", STANZA, f"{STANZA}, {PIECES} pieces"
LAYOUTS = {
    f"{SERVER} 1": "one server",
    SERVERS: "best number of servers",
    SHARDS: "server in shards",
    RING: "ring all-reduce",
}


def derived(results: pd.DataFrame) -> pd.DataFrame:
    """More rows, of each point and seed: the best number of dedicated servers; Stanza as the planner has chosen."""
    found = []
    seeds = results.groupby(["setting", "arm"])["seed"].unique()
    for point in points():
        of_point = results[(results["setting"] == point.setting) & (results["arm"] == point.arm)]
        chosen = point.n_fc
        named = {CHOSEN: f"{STANZA} {chosen}", IN_PIECES: f"{STANZA} {chosen}, {PIECES} pieces"}
        for seed in seeds[point.setting, point.arm]:
            runs = of_point[of_point["seed"] == seed].set_index("paradigm")
            dedicated = runs.loc[[f"{SERVER} {n}" for n in range(1, point.nodes // 2 + 1)]]
            best = dedicated["samples_per_s"].idxmax()
            rows = {SERVERS: (best, int(best.split()[-1]))} | {name: (run, chosen) for name, run in named.items()}
            found += [
                {**runs.loc[run].to_dict(), "seed": seed, "paradigm": name, "nodes_apart": apart}
                for name, (run, apart) in rows.items()
            ]
    return pd.concat([results, pd.DataFrame(found)], ignore_index=True)


# ---- what is claimed ----

LEAST, MOST = 1.34, 13.9
RANGE = "1.34 to 13.9, printed for common models"
NEAR = 1.2  # times either end of it counts as reaching it
ORDER = (("alexnet", "vgg16"), ("vgg16", "vgg19"), *(("vgg19", other) for other in tuple(SPEEDS)[3:]))
FC_LIGHT = ("inception_v3", "resnet50", "resnet152")
FITS = 128  # the largest batch with which Inception-v3 and ResNet-50 were measured on a V100 of 16 GB
AS_PLANNED = 0.05
PLAUSIBLE = 0.25  # of its links a parameter server may well get no more than this


def speed_up(point: Point, other: str, ours: str = CHOSEN) -> Of:
    """Return the ratio of samples per second."""
    a, b = (of("samples_per_s", point.setting, point.arm, method) for method in (ours, other))
    return ratio(a, b)


def claims() -> list[Claim]:
    found = []
    for gbit in GBIT:
        for nodes in NODES:
            for layout in LAYOUTS:
                along = {model: Point(model, gbit, nodes) for model in SPEEDS}
                found += against(f"{nodes} nodes, {gbit:g} Gbit/s", along, layout)
    for arm, words in (
        ("jitter", f"times vary, jitter {JITTER:g}"),
        ("fast", "compute at the other rates"),
        ("batch-32", "batches of 32"),
    ):
        for layout in LAYOUTS:
            found += against(words, {model: Point(model, *BASE, arm) for model in SPEEDS}, layout)
    for layout, words in LAYOUTS.items():
        for model in SPEEDS:
            aim, high = (LEAST, FITS) if model in FC_LIGHT else (MOST, np.inf)
            says = f"the batch with which {TITLES[model]}'s speed-up over {words} is {aim:g}"
            found.append(Claim(says, "", batch_for(model, layout, aim), BATCHES[0], high))
    for model in SPEEDS:
        point = Point(model, *BASE, "batch-32")
        says = f"batches of 32: speed-up over {LAYOUTS[SHARDS]} that gets half of the links: {TITLES[model]}"
        found.append(Claim(says, "", with_share(point, 0.5), LEAST, MOST, expected=RANGE))
        if model not in ("vgg16", "vgg19"):
            aim = LEAST if model in FC_LIGHT else MOST
            says = f"batches of 32: share of the links with which it is {aim:g}: {TITLES[model]}"
            found.append(Claim(says, "", link_share(point, aim), PLAUSIBLE, 1.0))
    for model in SPEEDS:
        point = Point(model, *BASE)
        found += volumes(TITLES[model], point)
        says = f"{TITLES[model]}: samples a second in {PIECES} pieces / in one"
        found.append(Claim(says, "", speed_up(point, CHOSEN, IN_PIECES), low=1.0))
    return found + as_planned()


def against(where: str, along: dict[str, Point], layout: str) -> list[Claim]:
    """Each model's speed-up, and their order."""
    words = f"{where}: speed-up over {LAYOUTS[layout]}"
    low, high, expected = (1.0, np.inf, "") if layout == RING else (LEAST, MOST, RANGE)
    found = [
        Claim(f"{words}: {TITLES[model]}", "", speed_up(point, layout), low, high, expected=expected)
        for model, point in along.items()
    ]
    if layout != RING:
        speed_ups = [speed_up(point, layout) for point in along.values()]
        found += [
            Claim(
                f"{words}: the {end} of all models", f"{printed:g}", of_all(speed_ups), printed / NEAR, printed * NEAR
            )
            for end, printed, of_all in (("least", LEAST, least), ("largest", MOST, largest))
        ]
    steps = [ratio(speed_up(along[more], layout), speed_up(along[fewer], layout)) for more, fewer in ORDER]
    says = f"{words}: the least of AlexNet's / VGG-16's, VGG-16's / VGG-19's, VGG-19's / each other's"
    return [*found, Claim(says, "", least(steps), low=1.0, expected="more than 1, by volume")]


def least(each: Iterable[Of]) -> Of:
    every = tuple(each)
    return lambda results: pd.concat([one(results) for one in every], axis=1).min(axis=1)


def largest(each: Iterable[Of]) -> Of:
    every = tuple(each)
    return lambda results: pd.concat([one(results) for one in every], axis=1).max(axis=1)


def batch_for(model: str, layout: str, aim: float) -> Of:
    """Between those tried; not known if none of them has it on either side."""

    def number(results: pd.DataFrame) -> pd.Series:
        each = [speed_up(Point(model, *BASE, f"batch-{batch}"), layout)(results) for batch in BATCHES]
        logs = np.log(pd.concat(each, axis=1).to_numpy())
        found = [np.interp(-np.log(aim), -log, np.log(BATCHES), np.nan, np.nan) for log in logs]
        return pd.Series(np.exp(found), index=each[0].index)

    return number


def with_share(point: Point, share: float) -> Of:
    """Return the speed-up over a sharded server that gets this share of its links; Stanza gets all of them."""
    per_s, transfers_s = of("samples_per_s", point.setting, point.arm, CHOSEN), _transfers_s(point)
    samples, batch_s = point.nodes * point.batch, point.profile.times.batch_s
    return lambda results: per_s(results) * (batch_s + transfers_s(results) / share) / samples


def link_share(point: Point, aim: float) -> Of:
    """Return the share of the links with which that speed-up is `aim`."""
    per_s, transfers_s = of("samples_per_s", point.setting, point.arm, CHOSEN), _transfers_s(point)
    samples, batch_s = point.nodes * point.batch, point.profile.times.batch_s
    return lambda results: transfers_s(results) / (samples * aim / per_s(results) - batch_s)


def _transfers_s(point: Point) -> Of:
    """Return the seconds of transfers in an iteration with a sharded server."""
    iteration_s = of("iteration_s", point.setting, point.arm, SHARDS)
    return lambda results: iteration_s(results) - point.profile.times.batch_s


def volumes(title: str, point: Point) -> list[Claim]:
    """Claim that the bytes in the traces equal the formula's, except for a ring's part of a byte at each node."""
    profile, nodes = point.profile, point.nodes
    groups = Groups(nodes, 1)
    expected = {
        BESIDE: (stanza_planner.parameter_server_bytes(profile, nodes), 0),
        RING: (stanza_planner.ring_bytes(profile, nodes), nodes),
        f"{STANZA} 1": (
            stanza_planner.stanza_bytes(profile, groups) + stanza_planner.label_bytes(profile, groups),
            nodes,
        ),
    }
    return [
        Claim(
            f"{title}, {nodes} workers, batch {point.batch}, bytes of an iteration less the formula's: {method}",
            "",
            _less(of("bytes", point.setting, point.arm, method), n_bytes),
            -rounding,
            0.0,
            " bytes",
            f"{n_bytes / 1e6:.1f} MB, by the formula",
        )
        for method, (n_bytes, rounding) in expected.items()
    ]


def _less(a: Of, number: float) -> Of:
    return lambda results: a(results) - number


def as_planned() -> list[Claim]:
    """The planner's formula beside the simulation, of all points; and its choice beside one more and one fewer."""
    main = [point for point in points() if point.arm == "main"]
    seconds, shards, choices = [], [], []
    for point in main:
        n_fc = point.n_fc
        planned_s = stanza_planner.stanza_s(point.profile, point.links, Groups(point.nodes, n_fc))
        seconds.append(_times(of("iteration_s", point.setting, point.arm, CHOSEN), 1 / planned_s))
        shards_s = stanza_planner.sharded_server_s(point.profile, point.links, point.nodes)
        shards.append(_times(of("iteration_s", point.setting, point.arm, SHARDS), 1 / shards_s))
        others = {n_fc - 1, n_fc + 1} & set(range(1, point.nodes))
        choices += [speed_up(point, f"{STANZA} {n}") for n in sorted(others)]
    says = "simulated / planned seconds of an iteration, of all models, nodes and links"
    return [
        Claim(f"{says}: the least", "", least(seconds), 1 - AS_PLANNED, 1 + AS_PLANNED),
        Claim(f"{says}: the largest", "", largest(seconds), 1 - AS_PLANNED, 1 + AS_PLANNED),
        Claim(f"{says}, server in shards: the least", "", least(shards), 1 - AS_PLANNED, 1 + AS_PLANNED),
        Claim(f"{says}, server in shards: the largest", "", largest(shards), 1 - AS_PLANNED, 1 + AS_PLANNED),
        Claim("the same: the planner's choice / one more or fewer, the least", "", least(choices), low=1.0),
    ]


def _times(a: Of, factor: float) -> Of:
    return lambda results: a(results) * factor


# ---- figures ----

LOOKS: dict[str, dict[str, Any]] = {
    "alexnet": {"color": "#D55E00", "marker": "o"},
    "vgg16": {"color": "#0072B2", "marker": "s"},
    "vgg19": {"color": "#56B4E9", "marker": "D"},
    "inception_v3": {"color": "#009E73", "marker": "^"},
    "resnet50": {"color": "#CC79A7", "marker": "v"},
    "resnet152": {"color": "#000000", "marker": "x"},
}
TICKS = (1, 2, 5, 10, 20, 50, 100)


def ratios(results: pd.DataFrame, along: Iterable[Point], other: str) -> list[float]:
    return [float(speed_up(point, other)(results).mean()) for point in along]


def published(axis: Axes) -> None:
    for number in (LEAST, MOST):
        axis.axhline(number, lw=0.7, ls=":", color=plotting.GREY, zorder=0)
    axis.axhline(1.0, lw=0.6, color=plotting.GREY, zorder=0)


def in_decades(axis: Axes) -> None:
    axis.set(yscale="log")
    axis.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
    axis.minorticks_off()
    axis.set_ylim(0.7, 160)


def draw_speed_ups(results: pd.DataFrame, folder: Path) -> None:
    """Stanza's samples a second, as a multiple of each layout's, against the number of nodes."""
    figure, axes = plotting.panels(len(GBIT), len(LAYOUTS), height=4.6, sharex=True, sharey=True)
    rows = []
    for line, gbit in zip(axes, GBIT, strict=True):
        for axis, (layout, words) in zip(line, LAYOUTS.items(), strict=True):
            for model, look in LOOKS.items():
                numbers = ratios(results, [Point(model, gbit, nodes) for nodes in NODES], layout)
                axis.plot(NODES, numbers, ms=3.5, label=TITLES[model], **look)
                seen = zip(NODES, numbers, strict=True)
                rows += [[layout, gbit, model, nodes, round(number, 4)] for nodes, number in seen]
            published(axis)
            in_decades(axis)
            axis.set_xticks(NODES)
            if gbit == GBIT[0]:
                axis.set_title(words)
        line[0].set_ylabel(f"{gbit:g} Gbit/s\nStanza's samples a second / …")
    figure.supxlabel("nodes", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LOOKS))
    frame = pd.DataFrame(rows, columns=["layout", "gbit", "model", "nodes", "speed_up"])
    plotting.save(figure, frame, folder, "stanza-speed-ups")


def draw_where(results: pd.DataFrame, folder: Path) -> None:
    """Plot the speed-up against the number of servers and the batch size, with 10 nodes at 10 Gbit/s."""
    servers = [f"{SERVER} {n}" for n in range(1, BASE[1] // 2 + 1)]
    layouts, varied = [*servers, SHARDS, RING], (servers[0], SERVERS, RING)
    figure, axes = plotting.panels(1, 1 + len(varied), height=2.9, sharey=True)
    rows = []
    for model, look in LOOKS.items():
        base = Point(model, *BASE)
        numbers = [float(speed_up(base, layout)(results).mean()) for layout in layouts]
        axes[0, 0].plot(range(len(layouts)), numbers, ms=3.5, label=TITLES[model], **look)
        rows += [["layout", layout, model, round(x, 4)] for layout, x in zip(layouts, numbers, strict=True)]
        along = [Point(model, *BASE, f"batch-{batch}") for batch in BATCHES]
        for axis, other in zip(axes[0, 1:], varied, strict=True):
            numbers = ratios(results, along, other)
            axis.plot(BATCHES, numbers, ms=3.5, **look)
            rows += [[f"batch, {other}", batch, model, round(x, 4)] for batch, x in zip(BATCHES, numbers, strict=True)]
    ticks = [*(layout.split()[-1] for layout in servers), "shards", "ring"]
    axes[0, 0].set_xticks(range(len(layouts)), ticks)
    for label in axes[0, 0].get_xticklabels()[-2:]:
        label.set(rotation=90)
    axes[0, 0].set(xlabel="servers", title="layout", ylabel="Stanza's samples a second / …")
    for axis, other in zip(axes[0, 1:], varied, strict=True):
        axis.set(xscale="log", xlabel="batch of a worker", title=LAYOUTS[other])
        axis.set_xticks(BATCHES[::2], labels=map(str, BATCHES[::2]))
    for axis in axes[0]:
        published(axis)
        in_decades(axis)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LOOKS))
    frame = pd.DataFrame(rows, columns=["varied", "at", "model", "speed_up"])
    plotting.save(figure, frame, folder, "stanza-where")


# ---- all of it ----


def reproduce(out: Path, seeds: int, processes: int, console: Console) -> pd.DataFrame:
    """Simulate what is missing in the folder, write results, claims and figures there, print the claims."""
    todo = jobs(seeds)
    simulate_all(todo, out / "runs", processes, console)
    results = derived(pd.DataFrame([measure(out / "runs" / name) for name in todo]))
    draw_speed_ups(results, out)
    draw_where(results, out)
    return conclude(claims(), results, out, console, "Stanza, virtual time: mean (95 % interval)")
