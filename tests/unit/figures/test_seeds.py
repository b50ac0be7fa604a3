"""Traces that differ only in the seed: one line or bar, with a band whose ends are computed by hand."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy import stats

from hpcsync import figures
from hpcsync.figures import plotting, staleness, waiting
from hpcsync.report.variants import estimate, mean_and_band
from tests.unit.figures.test_figures import with_seed
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import edit, record, with_rows, with_status

GROUPED = ("accuracy", "adaptive", "consensus", "leads", "staleness", "waiting")
MEAN = {"accuracy": "mean", "consensus": "consensus_distance", "leads": "push_gap_iters", "waiting": "wait_share"}


def three(name, n=3):
    """Return traces of one job with different seeds and courses."""
    kind = {"adaptive": "k-batches", "controller": "dssp", "leads": "asp"}.get(name, "ssp")
    if name == "consensus":
        trace = peer_recorder.record("push-sum")
        return [with_seed(edit(trace, "evaluations", 1, consensus_distance=0.1 + seed), seed) for seed in range(n)]
    return [with_seed(record(kind, (1.0, 1.1, 2.0 + 0.2 * seed), updates=60), seed) for seed in range(n)]


def words(drawing):
    """Return the texts above the panels."""
    titles = [legend.get_title().get_text() for legend in drawing.figure.legends]
    above = drawing.figure._suptitle
    return " ".join([*titles, above.get_text() if above else ""]).replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")


def test_the_band_of_three_seeds_is_students_interval():
    values = np.array([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]])
    mean, low, high = mean_and_band(values)
    # By hand: mean 3, squares 4 + 1 + 9, standard error sqrt(14 / 2 / 3), t = 4.303 with two degrees of freedom.
    half = 4.302652729911275 * np.sqrt(14 / 6)
    assert np.allclose([mean, low, high], [[3, 4], [3 - half, 4], [3 + half, 4]], rtol=1e-12)
    column = values[:, 0]
    assert np.allclose((low[0], high[0]), stats.t.interval(0.95, 2, np.mean(column), stats.sem(column)), rtol=1e-12)
    assert high[0] - mean[0] == pytest.approx(estimate(column.tolist()).half_width, rel=1e-12)
    wrong = stats.norm.interval(0.95, np.mean(column), stats.sem(column))  # control: it takes the error as known
    assert not np.allclose((low[0], high[0]), wrong, rtol=0.1)


def test_the_band_of_fewer_seeds_is_the_range():
    assert [each.tolist() for each in mean_and_band(np.array([[1.0], [4.0]]))] == [[2.5], [1.0], [4.0]]
    assert [each.tolist() for each in mean_and_band(np.array([[1.0]]))] == [[1.0], [1.0], [1.0]]


def test_steps_hold_and_lines_are_interpolated():
    runs = [np.array([[0, 1], [2, 3], [4, 3]], float), np.array([[0, 1], [3, 5], [6, 5]], float)]
    line = plotting.averaged(runs, steps=True)
    assert line["x"].tolist() == [0, 2, 3, 4, 6]
    assert line["mean"].tolist() == [1, 2, 4, 4, 4]  # a run that has ended keeps its last value
    assert line["low"].tolist() == [1, 1, 3, 3, 3] and line["high"].tolist() == [1, 3, 5, 5, 5]
    assert line["runs"].tolist() == [2, 2, 2, 2, 1]
    assert plotting.averaged(runs)["mean"].tolist() != line["mean"].tolist()  # control: not as a line
    late = [np.array([[1.0, 0.0], [2.0, 2.0]]), np.array([[1.5, 1.0], [2.0, 2.0]])]
    assert plotting.averaged(late)["x"].tolist() == [1.5, 2.0], "from where all runs have begun"


@pytest.mark.parametrize("name", GROUPED)
def test_three_seeds_are_one_line_with_a_band(name):
    (drawing,) = figures.draw(name, three(name))
    frame = drawing.data
    assert frame["trace"].nunique() == 1
    assert "mean and 95 % interval of 3 seeds" in words(drawing)
    bands = [column.removesuffix("low") for column in frame if column.endswith("low")]
    assert bands
    for band in bands:
        mean = frame[MEAN.get(name, "mean") if band == "" else band.removesuffix("_")]
        known = frame[f"{band}low"].notna()
        assert (frame[f"{band}low"] <= mean + 1e-12)[known].all() and (mean <= frame[f"{band}high"] + 1e-12)[
            known
        ].all()
    assert any((frame[f"{band}low"] < frame[f"{band}high"]).any() for band in bands)
    if "runs" in frame:
        assert frame["runs"].max() == 3


@pytest.mark.parametrize("name", GROUPED)
def test_two_seeds_have_a_range_and_one_has_neither(name):
    (two,) = figures.draw(name, three(name, 2))
    assert "mean and range of 2 seeds" in words(two) and "interval" not in words(two)
    (one,) = figures.draw(name, three(name, 1))
    assert "seeds" not in words(one)


@pytest.mark.parametrize("name", GROUPED)
def test_control_jobs_that_differ_in_more_than_the_seed_are_not_averaged(name):
    traces = three(name)
    other = traces[2].job.model_copy(update={"name": "another"})
    traces[2] = dataclasses.replace(traces[2], attributes={**traces[2].attributes, "job": other.to_toml()})
    (drawing,) = figures.draw(name, traces)
    assert drawing.data["trace"].nunique() == 2
    assert "mean and range of 2 seeds" in words(drawing)


def test_a_failed_run_is_not_averaged_with_finished_ones():
    traces = three("accuracy")
    (drawing,) = figures.draw("accuracy", [*traces[:2], with_status(traces[2], "failed")])
    assert drawing.data["trace"].unique().tolist() == ["SSP, s = 2", "SSP, s = 2 (failed)"]


def test_the_numbers_of_seeds_are_named():
    trace = record("bsp", updates=4)

    def about(*sizes):
        groups = [[with_seed(trace, seed) for seed in range(n)] for n in sizes]
        return plotting.about_band(groups).replace("\N{NO-BREAK SPACE}", " ")

    assert about(1, 1) == ""
    assert about(1, 2) == "mean and range of 2 seeds"
    assert about(5, 3, 2) == "mean and 95 % interval of 3 or 5 seeds (range of 2)"
    assert plotting.about_band([[trace, trace]]) == "mean and range of 2 runs", "of one seed, on real ranks"


def test_each_seed_has_a_panel_or_a_figure_of_its_own_where_runs_have_no_common_course():
    assert len(figures.draw("controller", three("controller"))) == 3
    (drawing,) = figures.draw("timeline", three("timeline"))
    assert len(drawing.figure.axes) == drawing.data["trace"].nunique() == 3


def test_shares_of_waiting_are_means_of_the_runs_shares():
    traces = three("waiting")
    frame = waiting.mean_shares(traces, 16).set_index("worker")
    shares = [waiting.shares(trace) for trace in traces]
    for worker in ("all", 0, 1):
        values = [run.loc[worker, "wait_share"] for run in shares]
        band = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert frame.loc[worker, ["wait_share", "wait_share_low", "wait_share_high"]].tolist() == pytest.approx(
            [np.mean(values), *band], rel=1e-9
        )


def test_whiskers_end_where_shares_do():
    _, ((axis,),) = plotting.panels(1, height=1.0)
    plotting.draw_whiskers(axis, [0.9, 0.1, 0.5], [0.7, -0.1, 0.4], [1.1, 0.3, 0.7], [0, 1, 2])
    ((whiskers,),) = [container.lines[2] for container in axis.containers]
    ends = [segment[:, 0].tolist() for segment in whiskers.get_segments()]
    assert np.allclose(ends, [[0.7, 1.0], [0.0, 0.3], [0.4, 0.7]])
    _, ((alone,),) = plotting.panels(1, height=1.0)
    plotting.draw_whiskers(alone, [0.9], [0.9], [0.9], [0])
    assert not alone.containers, "one seed has no whiskers"


def test_histograms_of_several_runs_have_common_bins():
    bars = staleness.histogram([pd.Series([0, 0, 1, 3]), pd.Series([0, 2])])
    assert bars["staleness_updates"].tolist() == [0, 1, 2, 3]
    assert bars["share"].tolist() == [0.5, 0.125, 0.25, 0.125]
    assert bars["share_low"].tolist() == [0.5, 0, 0, 0] and bars["share_high"].tolist() == [0.5, 0.25, 0.5, 0.25]


def test_batch_sizes_have_a_band_for_each_worker():
    (drawing,) = figures.draw("adaptive", three("adaptive"))
    sizes = drawing.data[drawing.data["worker"].notna()]
    assert set(sizes["worker"]) == {0, 1, 2}
    assert all((own["batch_size_low"] < own["batch_size_high"]).any() for _, own in sizes.groupby("worker"))
    assert np.allclose(sizes[sizes["now_s"] == 0]["batch_size"], 8)


def test_the_band_of_a_logarithmic_axis_leaves_the_panel_below():
    lines = pd.DataFrame({"mean": [1.0, 0.4], "low": [0.5, -3.0], "high": [1.5, 3.8]})
    assert plotting.log_bottom(lines) == 0.2
    assert plotting.log_bottom(lines.assign(low=[0.9, 0.3])) == pytest.approx(0.285)


@pytest.mark.parametrize(
    ("bottom", "top", "expected"),
    [
        (0.013, 0.03, {"0.02", "0.03"}),
        (0.05, 1.2, {"0.05", "0.1", "0.2", "0.3", "0.5", "1"}),
        (1e-6, 1.2, {"0.0001", "0.01", "1"}),
    ],
)
def test_logarithmic_axes_have_a_few_labels(bottom, top, expected):
    figure, ((axis,),) = plotting.panels(1, height=2.0)
    axis.plot([0, 1], [bottom, top])
    axis.set_ylim(bottom, top)
    plotting.set_log_scale(axis, bottom)
    FigureCanvasAgg(figure).draw()
    shown = [tick for which in ("major", "minor") for tick in getattr(axis.yaxis, f"get_{which}_ticks")()]
    labels = {tick.label1.get_text() for tick in shown if bottom <= tick.get_loc() <= top} - {""}
    assert expected <= labels and len(labels) <= 9


def test_lines_of_an_axis_differ_in_dashes_or_markers():
    looks = [plotting.look(n, "#000000") for n in range(28)]
    assert len({(str(look["linestyle"]), look.get("marker")) for look in looks}) == len(looks)
    assert len({str(look["linestyle"]) for look in looks}) < len(looks)  # control: dashes alone do not suffice
    trace = record("bsp")
    styles = plotting.styles([trace] * 5)  # of one colour
    assert len({(str(style["linestyle"]), style.get("marker")) for style in styles}) == 5


def test_edges_of_a_band_have_the_dashes_of_their_line():
    _, ((axis,),) = plotting.panels(1, height=1.0)
    look = plotting.look(1, "#0072B2")
    plotting.draw_mean(axis, plotting.averaged([np.array([[0.0, 1], [1, 2]]), np.array([[0.0, 2], [1, 4]])]), look)
    dashes = {line.get_linestyle() for line in axis.lines}
    assert len(axis.lines) == 3 and len(axis.collections) == 1 and dashes == {"--"}
    _, ((alone,),) = plotting.panels(1, height=1.0)
    plotting.draw_mean(alone, plotting.averaged([np.array([[0.0, 1], [1, 2]])]), look)
    assert len(alone.lines) == 1 and not alone.collections, "one seed has no band"


def test_runs_whose_last_loss_is_not_finite_are_named():
    traces = three("accuracy")
    (drawing,) = figures.draw("accuracy", traces)
    assert "not finite" not in words(drawing)  # the control
    lost = [edit(traces[0], "evaluations", -1, loss=np.nan), *traces[1:]]
    (drawing,) = figures.draw("accuracy", lost)
    assert words(drawing).strip().endswith("; SSP, s = 2: loss not finite at the end in 1 of 3 runs")
    none = traces[0].tables["evaluations"].copy()
    none["loss"] = np.inf
    (drawing,) = figures.draw("accuracy", [with_rows(traces[0], "evaluations", none)])
    assert words(drawing).strip().endswith("; SSP, s = 2: loss not finite at the end")
    assert set(drawing.data["quantity"]) == {"accuracy"}
