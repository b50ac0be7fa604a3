"""Figures of one column of a paper: every text lies within the figure, and no two texts overlap."""

import struct
from functools import cache
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hpcsync import figures
from hpcsync.figures import plotting
from tests.unit.figures.test_figures import draw, hpcsync, refused, with_seed, with_target, write
from tests.unit.trace import peer_recorder
from tests.unit.trace.recorder import record

TOLERANCE = 1.0  # pixels by which the boxes of two texts may overlap


def visible_ticks(axis):
    """Return the labels of the ticks within the limits of an axis."""
    least, most = sorted(axis.get_view_interval())
    slack = 1e-9 * (most - least)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [tick.label1 for tick in ticks if least - slack <= tick.get_loc() <= most + slack]


def boxes(figure):
    """Return text and box of every visible text of a figure that has been drawn."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, figure._suptitle, figure._supxlabel, figure._supylabel]
    for axes in figure.axes:
        texts += [axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        texts += [*visible_ticks(axes.xaxis), *visible_ticks(axes.yaxis)]
        texts += [axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()]
    for legend in figure.legends:
        texts += [legend.get_title(), *legend.get_texts()]
    found = {id(text): text for text in texts if text is not None and text.get_visible() and text.get_text().strip()}
    return [(text, text.get_window_extent(renderer)) for text in found.values()]


def faults(figure):
    """Return in words what lies outside a figure and what overlaps."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    each, page = boxes(figure), figure.bbox
    found = [
        f"outside: {text.get_text()!r}"
        for text, box in each
        if min(box.x0, box.y0) < page.x0 - TOLERANCE or box.x1 > page.x1 + TOLERANCE or box.y1 > page.y1 + TOLERANCE
    ]
    for (text, one), (other, two) in combinations(each, 2):
        width, height = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
        if min(width, height) > TOLERANCE:
            found.append(f"overlap: {text.get_text()!r} and {other.get_text()!r}")
    return found


def seeds(*args, n=3, **how):
    return [with_seed(record(*args, **how), seed) for seed in range(n)]


@cache
def traces_of(name):
    if name == "consensus":
        return [peer_recorder.record(mode) for mode in ("push-sum", "permutation", "local-sgd", "allreduce")]
    if name == "controller":
        return [record(mode, (1.0, 1.1, 3.7), updates=80, jitter=0.3) for mode in ("dssp", "paper")]
    if name == "adaptive":
        adaptive = seeds("adaptive", (1.0, 1.1, 3.7), updates=80)
        return [*adaptive, *(record(kind, (1.0, 1.1, 3.7), updates=80) for kind in ("k-batches", "batches", "k-sync"))]
    others = [record(kind, (1.0, 1.1, 3.7), updates=80) for kind in ("dssp", "paper", "k-async")]
    traces = [*seeds("ashl", (1.0, 1.5, 3.0), updates=60), *others]
    return [with_target(trace, target_accuracy=0.85) for trace in traces]


@pytest.mark.parametrize("width", [3.0, 3.5, 7.0])
@pytest.mark.parametrize("name", figures.FIGURES)
def test_texts_lie_in_the_figure_and_do_not_overlap(name, width):
    traces = traces_of(name)
    with plotting.style(width):
        for drawing in figures.draw(name, traces, width=width):
            assert drawing.figure.get_figwidth() == width
            assert faults(drawing.figure) == []
            sizes = {text.get_fontsize() for text, _ in boxes(drawing.figure)}
            assert 7 <= min(sizes) <= max(sizes) <= 8


@pytest.mark.parametrize("target", [1e-4, 0.5, 30.0, -1.0])
def test_a_target_that_is_far_away_lies_in_the_panel(target):
    traces = [with_target(record("asp", updates=20), target_loss=target)]
    with plotting.style():
        (drawing,) = figures.draw("accuracy", traces)
        assert faults(drawing.figure) == []
        for axes in drawing.figure.axes[2:]:
            least, most = axes.get_ylim()
            assert least < target < most
            assert axes.get_position().height > 0.2


def test_control_a_long_title_and_two_texts_in_one_place_are_found():
    with plotting.style(3.5):
        (drawing,) = figures.draw("consensus", traces_of("consensus"), width=3.5)
        axis = drawing.figure.axes[0]
        axis.set_title("a title that is longer than the column of a paper is wide, and is not wrapped")
        assert [fault for fault in faults(drawing.figure) if fault.startswith("outside: 'a title that")]
        axis.set_title("")
        for _ in range(2):
            axis.text(0.5, 0.5, "twice", transform=axis.transAxes)
        assert faults(drawing.figure) == ["overlap: 'twice' and 'twice'"]


def test_control_ticks_that_collide_are_found():
    with plotting.style(3.5):
        (drawing,) = figures.draw("consensus", traces_of("consensus"), width=3.5)
        drawing.figure.axes[0].set_xticks([0.0, 0.01, 0.02])
        assert any(fault.startswith("overlap: '0.0") for fault in faults(drawing.figure))


def test_ticks_of_panels_side_by_side_keep_apart():
    with plotting.style(3.5):
        (drawing,) = figures.draw("staleness", [record("bsp")], width=3.5)
        drawing.figure.axes[0].set(xlim=(0, 100), xticks=[0, 100])
        drawing.figure.draw_without_rendering()
        box = {text.get_text(): box for text, box in boxes(drawing.figure)}
        assert box["0 %"].x0 - box["100"].x1 > 0.1 * drawing.figure.dpi  # inches


def test_wrapped_lines_fit():
    text = "a title that is longer than the column of a paper is wide " + 40 * "x"
    lines = plotting.wrapped(text, 1.5).split("\n")
    assert len(lines) > 3 and all(plotting.text_inches(line) <= 1.5 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert plotting.wrapped("short", 1.5) == "short"


def test_the_width_of_the_file_is_that_of_the_option(tmp_path):
    run = write(tmp_path, record("bsp"))
    draw("staleness", tmp_path, run, "--width", 3.5)
    png = (tmp_path / "figures/staleness.png").read_bytes()
    assert struct.unpack(">I", png[16:20]) == (round(3.5 * plotting.STYLE["savefig.dpi"]),)
    draw("staleness", tmp_path, run)
    png = (tmp_path / "figures/staleness.png").read_bytes()
    assert struct.unpack(">I", png[16:20]) == (round(7 * plotting.STYLE["savefig.dpi"]),)


@pytest.mark.parametrize("width", ["2.9", "-1", "nan", "inf", "51"])
def test_other_widths_are_refused_in_one_line(width, tmp_path):
    run = write(tmp_path, record("bsp"))
    assert refused("waiting", run, "--width", width) == f"figure waiting: --width {width}: must be 3 to 50 (inches)\n"
    assert not (tmp_path / "figures").exists()


def test_a_width_that_is_no_number_is_refused(tmp_path):
    result = hpcsync("figure", "waiting", write(tmp_path, record("bsp")), "--width", "wide")
    assert result.exit_code == 2 and "Invalid value for '--width'" in result.stderr
