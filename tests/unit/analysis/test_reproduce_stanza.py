"""The reproduction about Stanza: layouts share nodes, traces say what formulas say, and verdicts what results say."""

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from hpcsync.planning.split_cost import Shape
from hpcsync.workloads import torchvision_models
from reproductions import stanza
from reproductions.claims import judged
from reproductions.simulating import simulate_all
from reproductions.stanza import FC_LIGHT, SERVER, SHARDS, SPEEDS, Point

MODELS = {model: Shape(2_000, 50_000, 40, conv_flops=9_000, fc_flops=1_000) for model in SPEEDS}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models of the same names, most of whose parameters are fully connected."""
    monkeypatch.setattr(torchvision_models, "shape", MODELS.__getitem__)


# ---- jobs ----


def test_a_node_takes_for_a_batch_what_a_v100_was_measured_to_take():
    for model, speed in SPEEDS.items():
        assert Point(model, 10.0, 4).seconds == pytest.approx(speed.batch / speed.rate)
        assert Point(model, 10.0, 4, "fast").seconds == pytest.approx(speed.batch / speed.fast)
        assert Point(model, 10.0, 4, "batch-8").seconds == pytest.approx(8 / speed.rate)
        times = Point(model, 10.0, 4).profile.times
        assert times.batch_s == pytest.approx(speed.batch / speed.rate)
        assert times.fc_s == pytest.approx(0.1 * times.batch_s)


def test_all_layouts_share_the_nodes_but_the_server_beside_them():
    for name, job in stanza.jobs(1).items():
        setting, _, method, _ = name.split("/")
        extra = {"server_beside": 1, "server_in_shards": int(setting.split("-")[-1])}.get(method, 0)
        assert job.cluster.workers + job.cluster.servers == int(setting.split("-")[-1]) + extra
        assert job.cluster.network.bandwidth_gbit == float(setting.split("-")[-2])


# ---- what came of it ----


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Of one point, and what follows from it."""
    point = Point("vgg16", *stanza.BASE)
    monkeypatch.setattr(stanza, "points", lambda: [point])
    todo = stanza.jobs(1)
    simulate_all(todo, tmp_path, 1, Console(quiet=True))
    return point, stanza.derived(pd.DataFrame([stanza.measure(tmp_path / name) for name in todo]))


def test_bytes_and_seconds_are_those_of_the_formulas(results):
    point, found = results
    verdicts = judged([*stanza.volumes("small", point), *stanza.as_planned()], found)
    assert (verdicts["verdict"] == "holds").all() and len(verdicts) == 8
    wrong = found.assign(bytes=found["bytes"] + 1, iteration_s=found["iteration_s"] * 1.1)
    assert not (judged([*stanza.volumes("small", point), *stanza.as_planned()[:2]], wrong)["verdict"] == "holds").all()


def test_layouts_are_the_best_of_those_tried_and_shards_have_all_of_their_links(results):
    point, found = results
    per_s = found.set_index("paradigm")["samples_per_s"]
    tried = [per_s[f"{SERVER} {n}"] for n in range(1, point.nodes // 2 + 1)]
    assert per_s["servers"] == max(tried) > min(tried)
    assert per_s["Stanza"] == per_s[f"Stanza {point.n_fc}"]
    as_it_is = stanza.speed_up(point, SHARDS)(found).item()
    assert stanza.with_share(point, 1.0)(found).item() == pytest.approx(as_it_is)
    half = stanza.with_share(point, 0.5)(found).item()
    assert half > as_it_is
    assert stanza.link_share(point, half)(found).item() == pytest.approx(0.5)


# ---- claims ----


def every_run(speed_up):
    """Results of everything that is claimed; speed_up(model, batch) is Stanza's over every other layout."""
    rows = []
    for point in stanza.points():
        layouts = [*stanza.LAYOUTS, *(f"Stanza {n}" for n in range(1, 4))]
        per_s = dict.fromkeys(layouts, 1.0) | {stanza.CHOSEN: speed_up(point.model, point.batch)}
        rows += [(point.setting, point.arm, layout, 1, number) for layout, number in per_s.items()]
    return pd.DataFrame(rows, columns=["setting", "arm", "paradigm", "seed", "samples_per_s"])


def test_the_order_holds_as_it_is_and_not_with_two_exchanged():
    among = {model: Point(model, *stanza.BASE) for model in SPEEDS}
    gains = dict(zip(SPEEDS, (13.0, 11.0, 8.0, 1.4, 1.5, 1.6), strict=True))
    for found, holds in ((gains, True), (gains | {"vgg16": 14.0}, False), (gains | {"resnet152": 9.0}, False)):
        verdicts = judged(stanza.against("here", among, stanza.RING), every_run(lambda m, _, f=found: f[m]))
        assert (verdicts["verdict"].iloc[-1] == "holds") == holds


def test_the_batch_for_a_speed_up_lies_between_those_that_have_more_and_less():
    found = every_run(lambda model, batch: 100 / batch)
    assert stanza.batch_for("alexnet", stanza.RING, 100 / 48)(found).item() == pytest.approx(48)
    assert np.isnan(stanza.batch_for("alexnet", stanza.RING, 50.0)(found).item())
    assert set(FC_LIGHT) < set(SPEEDS)
