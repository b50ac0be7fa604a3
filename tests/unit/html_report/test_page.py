"""The page of a report without a browser: what it says, that it loads nothing, and that every text is escaped."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment, FileSystemLoader

from hpcsync.audit.check import Check
from hpcsync.config.errors import printable
from hpcsync.config.predicted import Prediction
from hpcsync.html_report import charts, curves, page, run_data
from hpcsync.html_report.page import render
from hpcsync.html_report.run_data import Decisions, RunData, evenly
from hpcsync.trace.reader import load
from hpcsync.trace.schema import TABLES, Change, Outcome, Phase
from tests.unit.html_report import pages

HOSTILE = """<script>alert("x")</script>'&amp;"""
MARKS = ("bar", "fill", "hit", "mark", "ring", "whisker", "cell")
VOID = {"meta", "link", "img"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RunData]]:
    return pages.variants(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def text(runs: dict[str, list[RunData]]) -> str:
    return render({"": runs})


class Page(HTMLParser):
    """Elements of a page: names, attributes, the classes of marks without a title, and open elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.titled: list[bool] = []
        self.untitled: list[str] = []
        self._open: list[tuple[str, str, list[bool]]] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "title" and self._open:
            self._open[-1][2].append(True)
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("class") or "", []))

    def handle_endtag(self, tag: str) -> None:
        name, classes, titles = self._open.pop()
        assert name == tag
        is_legend = any(outer == "ul" for outer, _, _ in self._open)
        is_titled = bool(titles) or any(outer == "g" and found for outer, _, found in self._open)
        if set(classes.split()) & set(MARKS) and not is_titled and not is_legend:
            self.untitled.append(classes)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def loaded(text: str) -> list[str]:
    """Return everything in a page that would be loaded or carried out."""
    found = []
    for tag, attributes in Page(text).elements:
        if tag in ("script", "iframe", "object", "embed", "base", "form"):
            found.append(tag)
        for name, value in attributes.items():
            allowed = (value or "").startswith(("#", "data:,"))
            if name.startswith("on") or (name in ("src", "href", "srcset", "xlink:href", "data") and not allowed):
                found.append(f"{tag} {name}={value}")
    return found + re.findall(r"@import|url\(", text)


def test_the_page_loads_nothing(text: str) -> None:
    assert loaded(text) == []


@pytest.mark.parametrize(
    "part",
    [
        '<img src="https://example.org/a.png">',
        "<script>1</script>",
        '<p onclick="x()"></p>',
        '<link rel="stylesheet" href="a.css">',
        "<style>@import 'a.css'</style>",
        "<style>a { background: url(a.png) }</style>",
    ],
)
def test_what_loads_is_noticed(part: str) -> None:
    assert loaded(part)


def test_every_mark_tells_its_value_and_every_figure_has_its_numbers(text: str) -> None:
    parsed = Page(text)
    assert parsed.untitled == []
    marks = Counter(word for _, given in parsed.elements for word in (given.get("class") or "").split())
    assert all(marks[word] for word in MARKS), marks
    assert text.count("<summary>Numbers of this figure</summary>") == len(parsed.named("figure")) >= 6
    pictures = [given for given in parsed.named("svg") if given.get("aria-hidden") != "true"]
    assert len(pictures) > 6
    assert all(given.get("role") == "img" and given.get("aria-label") for given in pictures)


def outside(text: str) -> list[str]:
    """Return the elements of a page that reach beyond their picture."""
    found = []
    for wide, high, drawn in re.findall(r'<svg [^>]*viewBox="0 0 ([\d.]+) ([\d.]+)" role="img"[^>]*>(.*?)</svg>', text):
        for element in re.findall(r"<(?:rect|circle|line|text)[^>]*>", drawn):
            at = {name: float(value) for name, value in re.findall(r' ([a-z]+\d?)="(-?[\d.]+)"', element)}
            at |= {"x2": at["x"] + at["width"], "y2": at["y"] + at["height"]} if "width" in at else {}
            xs, ys = ([value for name, value in at.items() if name.strip("c12") == axis] for axis in "xy")
            if not (0 <= min(xs) <= max(xs) <= float(wide) and 0 <= min(ys) <= max(ys) <= float(high)):
                found.append(element)
    return found


def test_every_mark_is_within_its_picture(text: str) -> None:
    assert outside(text) == []
    assert len(outside(text.replace('<rect x="', '<rect x="-'))) > 10


def test_a_mark_without_a_title_is_noticed() -> None:
    mark = '<rect class="bar compute"></rect>'
    assert Page(f"<svg>{mark}</svg>").untitled == ["bar compute"]
    assert Page(f"<svg><g><title>a</title>{mark}</g></svg>").untitled == []


def test_the_outline_is_complete(text: str) -> None:
    parsed = Page(text)
    ids = [str(given["id"]) for _, given in parsed.elements if "id" in given]
    assert len(ids) == len(set(ids))
    links = [str(given["href"]) for given in parsed.named("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    headings = re.findall(r'<h2 id="[^"]+">([^<]+)</h2>', text)
    assert headings == [
        "Verdict",
        "Time to the target",
        "Accuracy and loss",
        "Where the workers&#39; time went",
        "Who waited for whom",
        "Staleness and lead",
        "Decisions of the controllers",
        "Runs",
        "Audit",
        "Job",
        "Versions",
        "How to cite",
    ]
    for tag in ("header", "nav", "main", "footer", "h1"):
        assert len(parsed.named(tag)) == 1
    assert parsed.named("html") == [{"lang": "en"}]
    assert all("scope" in given for given in parsed.named("th"))


def test_the_numbers_are_those_of_the_runs(text: str, runs: dict[str, list[RunData]]) -> None:
    for each in (run for variant in runs.values() for run in variant):
        assert each.checks is not None
        assert f"all {len(each.checks)} checks passed" in text
        assert each.summary.time_to_target_s is not None
        assert f"one run, {page.number(each.summary.time_to_target_s)} s" in text
    assert re.findall(r"\d evenly spaced of|variants are shown", text) == []
    assert "dssp reached loss 0.3 soonest, after " in text
    assert "audits passed</dt><dd>6 of 6" in text
    assert "@inproceedings{zhao2019dynamic" in text
    assert "staleness_max = " in text


def test_facts_and_the_table_of_runs(runs: dict[str, list[RunData]]) -> None:
    other = {"name": "second", "engine": None, "n_servers": 0, "n_workers": 4, "duration_s": 1234.5678}
    other |= {"updates": 1200, "samples": 4096, "samples_per_s": 3.3178, "time_to_target_s": None}
    other |= {"final_accuracy": 0.5, "final_loss": 0.25, "wire_bytes": 2_500_000}
    first, second, third = runs["bsp"]
    lone = third._replace(path=Path("traces", "x.h5"), summary=third.summary.model_copy(update=other))
    text = render({"": {"bsp": [second, first], "other": [lone]}})
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text) == [
        ("runs", "3"),
        ("variants", "2"),
        ("seeds", "3"),
        ("workers", "3 to 4"),
        ("engine", "virtual time"),
        ("target", "loss 0.3"),
        ("audits passed", "3 of 3"),
    ]
    assert "<h1>2 jobs</h1>" in text
    assert "<h1>small</h1>" in render({"": {"bsp": [first, second]}})
    rows = re.findall(r"<tr><th[^>]*>(.*)</td></tr>", text.partition('id="runs"')[2].partition('id="audit"')[0])
    cells = [re.split(r"</t[hd]><td>", row) for row in rows]
    assert [row[:3] for row in cells] == [
        ["bsp", "1", "finished"],
        ["bsp", "2", "finished"],
        ["other", "3", "finished"],
    ]
    assert cells[0][3:6] == ["simulator", "1", "3"]
    assert cells[0][-1] == str(first.path.parent)
    time_s = ["1,235", "1,200", "4,096", "3.318", "-"]
    assert cells[2][3:] == ["-", "-", "4", *time_s, "0.5", "0.25", "2.5", "traces/x.h5"]


def test_results_of_audits(runs: dict[str, list[RunData]]) -> None:
    first, second, third = runs["bsp"]
    failed = second._replace(checks=(Check("a", False, 3, "why"), Check("b", True, 4)))
    text = render({"": {"bsp": [first, failed, third._replace(checks=None)]}})
    assert re.findall(r'<summary><span class="(\w+)">([^<]*)</span>', text) == [
        ("good", f"all {len(first.checks or ())} checks passed"),
        ("bad", "1 of 2 checks failed"),
        ("note", "not audited here: hpcsync report --audit audits every run"),
    ]
    assert "<dt>audits passed</dt><dd>1 of 2</dd>" in text


def test_the_soonest_variants_are_in_figures(runs: dict[str, list[RunData]]) -> None:
    def in_time(run: RunData, time_s: float | None) -> list[RunData]:
        return [run._replace(summary=run.summary.model_copy(update={"time_to_target_s": time_s}))]

    many = {f"variant {i}": in_time(runs["bsp"][0], None if i == 3 else 20.0 - i) for i in range(10)}
    figures = render({"": many}).partition('id="time"')[2].partition('id="waiting"')[0]
    assert re.findall(r'<p class="panel-name">variant (\d)</p>', figures) == list("12456789")
    assert "The 8 soonest of 10 variants are shown." in figures
    none = {label: in_time(run, None) for label, (run,) in many.items()}
    assert "The first 8 of 10 variants are shown." in render({"": none})


def test_figures_are_of_the_first_conditions(runs: dict[str, list[RunData]]) -> None:
    for n, n_limited in ((6, 0), (7, 6)):
        text = render({f"condition {i}": {"dssp": runs["dssp"][:2]} for i in range(n)})
        assert text.count("Figures of the first 6 of 7 conditions.") == n_limited
        assert "<dt>target</dt>" not in text
        assert re.findall(r"<h3>condition (\d)", text.partition('id="time"')[2].partition('id="waiting"')[0]) == [
            *"012345"
        ]


def test_the_same_traces_give_the_same_page(text: str, runs: dict[str, list[RunData]]) -> None:
    assert render({"": runs}) == text


def test_a_version_of_several_lines_is_one(runs: dict[str, list[RunData]]) -> None:
    lines = printable("MPICH Version: 5.0.2\nMPICH Release date: Fri Sep 25")  # as the reader returns them
    run = next(iter(runs.values()))[0]
    text = render({"": {"one": [run._replace(attributes={**run.attributes, "mpi_library": lines})]}})
    assert "MPICH Version: 5.0.2; MPICH Release date: Fri Sep 25" in text and r"\nMPICH" not in text


def hostile(runs: dict[str, list[RunData]]) -> dict[str, dict[str, list[RunData]]]:
    """Return the runs with a script as label, condition, name, host, check, attribute and controller."""

    def changed(run: RunData) -> RunData:
        return run._replace(
            path=Path(HOSTILE, "trace.h5"),
            summary=run.summary.model_copy(update={"name": HOSTILE}),
            attributes={**run.attributes, "mpi_library": HOSTILE, "git_commit": HOSTILE},
            hosts=(HOSTILE, "b", "c"),
            checks=(Check(HOSTILE, False, 3, HOSTILE),),
            decisions={HOSTILE: next(iter(each.values()))} if (each := run.decisions) else {},
        )

    return {HOSTILE: {f"{label}{HOSTILE}": [changed(run) for run in each] for label, each in runs.items()}}


def test_every_text_is_escaped(runs: dict[str, list[RunData]]) -> None:
    text = render(hostile(runs))
    assert loaded(text) == []
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;&#39;&amp;amp;") > 50


def test_a_template_that_does_not_escape_is_noticed(
    runs: dict[str, list[RunData]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FileSystemLoader(Path(page.__file__).parent)
    plain = Environment(loader=folder, autoescape=False, trim_blocks=True, lstrip_blocks=True)
    monkeypatch.setattr(page, "_environment", lambda: plain)
    text = render(hostile(runs))
    assert HOSTILE in text
    with pytest.raises(AssertionError):
        assert loaded(text) == []


def test_runs_without_servers_without_a_target_and_unfinished(tmp_path: Path) -> None:
    stop = "stop={updates = 30}"
    gossip = pages.data(tmp_path, 'paradigm={name = "gossip", mode = "pull"}', stop)
    text = render({"": {"gossip": [gossip]}})
    assert "it has no target" in text
    assert 'id="staleness"' not in text
    assert 'id="target"' not in text
    failed = gossip._replace(summary=gossip.summary.model_copy(update={"status": "failed"}), checks=None)
    text = render({"": {"gossip": [failed]}})
    assert "did not finish: its status is failed" in text
    assert "No run was audited." in text
    empty = failed._replace(
        parts_s=np.zeros_like(gossip.parts_s), evaluations=gossip.evaluations[:0], decisions={}, hosts=("", "", "")
    )
    assert "No iteration was recorded." in render({"": {"gossip": [empty]}})


def test_deaths_and_stalls_are_listed(runs: dict[str, list[RunData]]) -> None:
    membership = np.zeros(2, TABLES["membership"])
    membership["worker"], membership["change"] = [1, 2], [Change.DIED, Change.LEFT]  # worker 2 ends with its data
    stalls = np.zeros(1, TABLES["stalls"])
    stalls["worker"], stalls["phase"], stalls["lasted_s"] = 2, Phase.COMPUTING, 4.25
    run = runs["bsp"][0]._replace(membership=membership, stalls=stalls, n_stalls=7)
    text = render({"": {"bsp": [run]}})
    assert "there were 7 reports of a stall." in text
    assert "1 of 7 rows." in text
    assert ">died<" in text
    assert ">left<" not in text
    assert ">4.25<" in text


def test_who_waited_for_whom(runs: dict[str, list[RunData]]) -> None:
    run = runs["bsp"][0]
    small = np.array([[0, 0, 2.5], [0, 0, 1.5], [0, 0, 0]])
    text = render({"": {"bsp": [run._replace(waits_s=small)]}})
    assert Page(text).untitled == []
    assert text.count('class="cell"') == 9
    assert "bsp: worker 0 waited 2.5 s in all for worker 2" in text
    assert "bsp: 4 s in all" in text
    cells = re.findall(r"<tr><th scope=.row.>bsp</th>(.*worker.*)</tr>", text)
    assert [re.findall(r"<td>([^<]*)", row) for row in cells] == [
        ["worker 0", "worker 2", "2.5", "62.50"],
        ["worker 1", "worker 2", "1.5", "37.50"],
    ]
    large = np.zeros((100, 100))
    large[:, 99] = np.arange(100) / 10
    text = render({"": {"bsp": [run._replace(waits_s=large)]}})
    assert text.count('class="cell"') == 16 * 16
    assert re.search(r'class="tick" text-anchor="middle">99<', text), "two digits are as wide as a column"
    wider = np.zeros((200, 200))
    wider[:100, 100:] = np.arange(100) / 10
    assert re.search(r'class="tick" transform="rotate[^"]*">199<', render({"": {"bsp": [run._replace(waits_s=wider)]}}))
    assert "worker 98 waited 9.8 s" in text
    assert "The 16 workers that waited or were waited for longest." in text
    assert 'id="waiting"' not in render({"": {"bsp": [run._replace(waits_s=np.zeros((3, 3)))]}})


def test_numbers_of_who_waited_for_whom_fit_into_their_cells(runs: dict[str, list[RunData]]) -> None:
    waits_s = np.diag([0.0012, 0.081, 2.5, 31_234.5, 123_456.0, 0.00087])
    for scale in (waits_s[:1, :1], waits_s[5:, 5:], waits_s[:3, :3], waits_s[3:5, 3:5]):
        largest = float(scale.max())
        text = render({"": {"bsp": [runs["bsp"][0]._replace(waits_s=scale)]}})
        wanted = {0.0012: ["0.0012"], 0.00087: [], 2.5: ["0.081", "2.5"], 123_456.0: ["31,234", "123k"]}[largest]
        assert re.findall(r'class="value" text-anchor="middle">([^<]+)<', text.partition('id="waiting"')[2]) == wanted


def test_numbers_of_a_long_run_have_no_powers_of_ten(runs: dict[str, list[RunData]]) -> None:
    run = runs["dssp"][0]
    waits_s = np.where(np.eye(3), 0.0, 31_234.5)
    long = run._replace(parts_s=1e5 * run.parts_s, waits_s=waits_s, staleness=np.eye(1, 4000, 3999, dtype=int)[0])
    text = render({"": {"dssp": [long], "again": [long]}})
    assert re.findall(r"[^ >]*\de\+\d.*", text) == []
    assert "dssp: worker 0 waited 31,234 s in all for worker 1" in text
    assert "dssp: mean 3,999, largest 3,999" in text


def test_losses_that_are_not_finite_are_named(runs: dict[str, list[RunData]]) -> None:
    first, *others = runs["dssp"]
    evaluations = first.evaluations.copy()
    evaluations["loss"][2:] = np.nan
    text = render({"": {"bsp": runs["bsp"], "dssp": [first._replace(evaluations=evaluations), *others]}})
    assert "A loss that is not finite is not drawn: at the end in 1 of 3 of dssp." in text
    assert "is not finite" not in render({"": runs})
    evaluations["loss"][-1] = 0.5
    assert "is not finite" not in render({"": {"dssp": [first._replace(evaluations=evaluations), *others]}})


def test_the_figure_of_times_has_arrivals_and_its_note_only_intervals_that_it_shows(
    runs: dict[str, list[RunData]],
) -> None:
    def late(run: RunData) -> RunData:
        return run._replace(summary=run.summary.model_copy(update={"time_to_target_s": None}))

    assert "dots are means with their 95 % interval (Student), rings" in render({"": runs})
    assert "dots are means, rings" in render({"": {label: each[:2] for label, each in runs.items()}})
    text = render({"": {label: [late(run) for run in each] for label, each in runs.items()}})
    assert "No run reached loss 0.3." in text
    assert 'id="target"' not in text


def test_a_prediction_is_beside_its_variant_and_an_audit_beside_its_file(runs: dict[str, list[RunData]]) -> None:
    predicted = Prediction(seconds=2.0)
    known = [
        each[0]._replace(
            summary=each[0].summary.model_copy(update={"predicted": predicted}), path=Path("traces", f"{label}.h5")
        )
        for label, each in runs.items()
    ]
    text = render({"": {label: [run] for label, run in zip(runs, known, strict=True)}})
    assert "<dt>predicted, bsp, seed 1</dt>" in text
    assert "<dt>predicted, dssp, seed 1</dt>" in text
    assert text.count("seed 1: traces/bsp.h5<") == text.count("seed 1: traces/dssp.h5<") == 1
    assert "<dt>predicted, seed 1</dt>" in render({"": {"bsp": known[:1]}})


def test_the_mean_staleness_of_a_figure_is_that_of_the_table(runs: dict[str, list[RunData]]) -> None:
    first, *others = runs["dssp"]
    fresh = first._replace(staleness=np.array([1000]), summary=first.summary.model_copy(update={"staleness_mean": 0.0}))
    means = [each.summary.staleness_mean or 0.0 for each in (fresh, *others)]
    text = render({"": {"bsp": runs["bsp"], "dssp": [fresh, *others]}})
    assert f"dssp: mean {np.mean(means):.3g}, largest" in text
    assert f"<td>{np.mean(means):.2f}</td>" in text
    total = charts._total(each.staleness for each in (fresh, *others))
    assert f"{charts._mean(total):.3g}" != f"{np.mean(means):.3g}", "the mean of all pushes is another one"


def test_the_legend_of_decisions_is_of_dots_where_the_figure_is(runs: dict[str, list[RunData]]) -> None:
    text = render({"": {"dssp": runs["dssp"][:1]}})
    assert re.findall(r'<circle class="(mark [^"]*)"[^>]*></circle></svg>(worker \d)', text)[0] == (
        "mark s0 d0",
        "worker 0",
    )


def test_the_choice_of_a_worker_holds_until_it_has_left_for_good(runs: dict[str, list[RunData]]) -> None:
    rows = np.array([(0.0, 0, 8.0), (0.0, 1, 8.0)], [("now_s", "f8"), ("worker", "i4"), ("chosen", "f8")])
    end_s = runs["dssp"][0].summary.duration_s
    changes = [(1, end_s / 4, 1, Change.LEFT), (2, end_s / 3, 1, Change.JOINED), (3, end_s / 2, 1, Change.DIED)]
    for n_changes, share in ((0, 1.0), (1, 1 / 4), (2, 1.0), (3, 1 / 2)):
        run = runs["dssp"][0]._replace(
            decisions={"batches": Decisions(2, 2, rows)},
            membership=np.array(changes[:n_changes], TABLES["membership"]),
        )
        ((_, drawn),) = charts.decisions("dssp", run, "batches").panels
        begins, ends = np.array(re.findall(r'<path d="M(\S+) \S+H(\S+)V', drawn), float).T
        assert (ends - begins)[1] / (ends - begins)[0] == pytest.approx(share, abs=0.01)


def test_both_panels_of_a_learning_curve_have_the_same_y_axis(runs: dict[str, list[RunData]]) -> None:
    figure = curves.learning_curves(runs, "loss")
    assert figure is not None
    found = [
        re.findall(r'y="([^"]*)" class="tick" text-anchor="end">([^<]*)<', picture) for _, picture in figure.panels
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 2


def on_y(drawn: str, *, log: bool) -> Callable[[float], float]:
    """Return the value at a position on the y axis of a picture, of which all ticks must be right."""
    ticks = re.findall(r'y="([^"]*)" class="tick" text-anchor="end">([^<]*)<', drawn)
    at, values = np.array([(float(y) - 4, float(value)) for y, value in ticks]).T
    values = np.log(values) if log else values
    line = np.polyfit(at, values, 1)
    assert len(ticks) > 2
    assert np.abs(np.polyval(line, at) - values).max() < 0.002 * np.ptp(values)
    return lambda y: float(np.exp(np.polyval(line, y)) if log else np.polyval(line, y))


@pytest.mark.parametrize(
    ("quantity", "first", "last", "log", "limits"),
    [
        ("loss", 2.0, 0.011, True, (0.0055, math.inf)),
        ("loss", 2.0, 0.11, False, (0.0, math.inf)),
        ("loss", 2.0, 0.0, False, (0.0, math.inf)),
        ("loss", 2.0, -0.11, False, (-math.inf, math.inf)),
        ("accuracy", 0.02, 0.9, False, (0.0, 1.0)),
    ],
)
def test_the_y_axis_of_a_learning_curve(
    runs: dict[str, list[RunData]], quantity: str, first: float, last: float, log: bool, limits: tuple[float, float]
) -> None:
    given = []
    for run, factor in zip(runs["bsp"], (0.1, 0.2, 2.7), strict=True):
        evaluations = run.evaluations[:20].copy()
        evaluations["now_s"], evaluations["samples"] = range(20), range(20)
        means = np.geomspace(first, last, 20) if last > 0 else np.linspace(first, last, 20)
        evaluations[quantity] = factor * means
        given.append(run._replace(evaluations=evaluations))
    figure = curves.learning_curves({"bsp": given}, quantity)
    assert figure is not None
    for _, drawn in figure.panels:
        value = on_y(drawn, log=log)
        ends = np.array([(float(low), float(high)) for *_, low, high in figure.table.rows]).clip(*limits)
        assert ends.max() == limits[1] or ends.min() == limits[0] or last < 0, "an interval beyond what is possible"
        (band,) = re.findall(r'd="([^"]*)Z" class="band', drawn)
        found = sorted(value(float(y)) for y in re.findall(r"[ML]\S+? ([\d.]+)", band))
        of_band, of_table = np.array([found[0], found[-1]]), np.array([ends.min(), ends.max()])
        if log:
            of_band, of_table = np.log(of_band), np.log(of_table)
        assert of_band == pytest.approx(of_table, abs=0.01 * np.ptp(of_table))
        if quantity == "loss":
            target = re.findall(r"target: loss 0.3</title><line x1=.64. x2=.426. y1=.([^\"]*). y2=.([^\"]*).", drawn)
            assert [value(float(y)) for y in target[0]] == pytest.approx([0.3, 0.3], rel=0.03)
            assert 'class="tick">target 0.3<' in drawn


@pytest.mark.parametrize(
    ("n_seeds", "about"),
    [
        ((1, 1), ""),
        ((2, 1), "bands the range of the two"),
        ((3, 1), "bands the 95 % interval of the mean (Student)"),
        ((2, 3), "bands the 95 % interval of the mean (Student), with two seeds their range"),
    ],
)
def test_the_note_of_a_learning_curve(runs: dict[str, list[RunData]], n_seeds: tuple[int, int], about: str) -> None:
    given = {label: each[:n] for (label, each), n in zip(runs.items(), n_seeds, strict=True)}
    figure = curves.learning_curves(given, "loss")
    assert figure is not None
    words = f"Lines are means over the seeds, {about}; a run that has ended keeps its last value. " if about else ""
    assert figure.note == f"{words}At most 75 evenly spaced points of each line are drawn."
    bands = [len(re.findall(r'Z" class="band s(\d)', drawn)) for _, drawn in figure.panels]
    assert bands == [sum(n > 1 for n in n_seeds)] * 2
    assert figure.legend == [("s0 d0", "bsp"), ("s1 d1", "dssp")]


def test_points_of_a_learning_curve(runs: dict[str, list[RunData]]) -> None:
    evaluations = np.zeros(500, TABLES["evaluations"])
    evaluations["now_s"], evaluations["samples"] = np.arange(500) / 4, 32 * np.arange(500)
    evaluations["loss"] = np.linspace(1.0, 0.5, 500)
    run = runs["bsp"][0]._replace(evaluations=evaluations)
    for n_lines, n_points in ((1, 75), (20, 8)):
        figure = curves.learning_curves({f"{i}": [run] for i in range(n_lines)}, "loss")
        assert figure is not None
        assert len(figure.table.rows) == 2 * n_lines * n_points
        assert (figure.table.rows[0][1:4], figure.table.rows[-1][1:4]) == (
            ("time (s)", "0", "1"),
            ("samples", "15,968", "0.5"),
        )
        for (name, drawn), last in zip(figure.panels, ("124.8 s", "15,968 samples"), strict=True):
            lines = re.findall(r'd="M([^"]*)" class="line', drawn)
            assert [line.count("L") for line in lines] == [n_points - 1] * n_lines
            x, y = lines[0].split("L")[-1].split()
            assert f'<circle cx="{x}" cy="{y}" r="3" class="dot s0 d0">' in drawn
            assert f"0: loss 0.5 at {last}</title>" in drawn
            assert name == f"loss against {'time' if last.endswith(' s') else 'samples'}"
        assert len(figure.legend) == (n_lines if n_lines > 1 else 0)


def test_the_legend_of_times_names_what_a_bar_has(runs: dict[str, list[RunData]]) -> None:
    run = runs["bsp"][0]
    parts_s = np.array([[0, 3, 1, 0, 1e-15], [0, 3, 1, 0, 0], [0, 0, 0, 0, 0]])
    for few_s, named in ((1e-15, ["compute", "wait"]), (1e-3, ["compute", "wait", "compression, between iterations"])):
        parts_s[0, 4] = few_s
        text = render({"": {"bsp": [run._replace(parts_s=parts_s)]}})
        assert re.findall(r'<rect class="bar [^>]*></rect></svg>([^<]*)</li>', text) == named


def test_long_tables_and_many_variants_are_thinned_and_it_is_said(runs: dict[str, list[RunData]]) -> None:
    many = {f"variant {i}": runs["dssp"] for i in range(20)}
    rows = np.zeros(400, [("now_s", "f8"), ("worker", "i4"), ("chosen", "f8")])
    rows["now_s"], rows["worker"] = np.linspace(0, 5, 400), np.arange(400) % 40
    long = runs["dssp"][0]._replace(
        decisions={"k": Decisions(123_456, 40, rows)},
        parts_s=np.ones((1000, 5)),
        slowness=np.ones(1000),
        hosts=("",) * 1000,
        summary=runs["dssp"][0].summary.model_copy(update={"workers": ()}),
    )
    text = render({"": {**many, "long": [long]}})
    assert "The 8 soonest of 21 variants are shown." in text
    assert len(text) < 3_000_000
    text = render({"": {"long": [long]}})
    assert "400 evenly spaced of 123,456 decisions." in text
    assert "At most 32 evenly spaced of 1,000 workers." in text
    assert "last iteration, not to the run" in text
    assert "300 evenly spaced of 400 rows." in text


def test_as_many_runs_are_audited_as_the_limit_allows(
    runs: dict[str, list[RunData]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(run.path, run.summary) for run in runs["dssp"]]
    n_rows = [run.summary.pushes or 0 for run in runs["dssp"]]
    assert all(n_rows)
    monkeypatch.setattr(run_data, "AUDITED_ROWS", n_rows[0] + n_rows[1])
    found = list(run_data.read_all(given))
    assert [run.checks is not None for run in found] == [True, True, False]
    monkeypatch.setattr(run_data, "AUDITED_ROWS_OF_A_RUN", n_rows[0] - 1)
    assert all(run.checks is None for run in run_data.read_all(given[:1]))
    assert all(run.checks for run in run_data.read_all(given, audited=True))
    assert all(run.checks is None for run in run_data.read_all(given, audited=False))
    assert "not audited here: hpcsync report --audit" in render({"": {"dssp": found}})
    path, summary = given[0]
    alone = path, summary.model_copy(update={"pushes": None})  # as without servers
    for limit, is_audited in ((summary.iterations, True), (summary.iterations - 1, False)):
        monkeypatch.setattr(run_data, "AUDITED_ROWS_OF_A_RUN", limit)
        assert (next(run_data.read_all([alone])).checks is not None) == is_audited
    for name in ("parts_s", "staleness", "leads"):  # in slices and in memory
        np.testing.assert_array_equal(getattr(found[2], name), getattr(runs["dssp"][2], name))


def test_what_is_counted(runs: dict[str, list[RunData]]) -> None:
    run = runs["dssp"][0]
    tables = load(run.path).tables
    applied = tables["pushes"][tables["pushes"]["outcome"] == Outcome.APPLIED]
    begun = tables["grants"][tables["grants"]["local_steps"] > 0]
    assert len(applied) < len(tables["pushes"]) and len(begun) < len(tables["grants"])
    assert run.staleness.tolist() == np.bincount(applied["staleness"]).tolist()
    assert run.leads.tolist() == np.bincount(begun["gap_iters"]).tolist()


def test_decisions_of_a_long_run_are_thinned_for_each_worker() -> None:
    columns = [("now_s", "f8"), ("worker", "i4"), ("chosen", "f8")]
    for n_workers, shown in ((4, [0, 1, 2, 3]), (100, [0, 20, 40, 59, 79, 99])):
        rows = np.zeros(8000, columns)  # the workers in turn, as batches are allocated
        rows["now_s"], rows["worker"] = np.arange(8000) // n_workers, np.arange(8000) % n_workers
        kept = run_data._thinned(rows, of_workers=True)
        assert len(kept) <= run_data.DECISIONS
        for worker in shown:
            own_s = kept["now_s"][kept["worker"] == worker]
            assert (own_s.min(), own_s.max()) == (0, 8000 // n_workers - 1)
        assert (np.diff(kept["now_s"]) >= 0).all()
        every_nth = run_data._thinned(rows, of_workers=False)  # as of choices for all workers
        assert np.ptp(every_nth["now_s"][every_nth["worker"] == shown[0]]) < 8000 // n_workers - 1


def test_evenly() -> None:
    assert evenly(list(range(10)), 3) == [0, 4, 9]
    assert evenly([1, 2], 3) == [1, 2]


# ---- colours and dashes ----


def test_no_two_lines_look_alike_and_neighbours_have_other_dashes() -> None:
    looks = [charts.series(i) for i in range(charts.COLOURS * charts.DASHES)]
    assert len(set(looks)) == len(looks)
    dashes = [look.split()[1] for look in looks[: charts.COLOURS]]
    assert all(len(set(dashes[i : i + charts.DASHES])) == charts.DASHES for i in range(charts.COLOURS - charts.DASHES))
    style = Path(page.__file__).with_name("style.css").read_text(encoding="utf-8")
    assert {f"d{n}" for n in re.findall(r"\.line\.d(\d) \{ stroke-dasharray", style)} == {*dashes} - {"d0"}


def colours(block: str) -> dict[str, tuple[float, float, float]]:
    found = re.findall(r"--(\w+): #(\w{2})(\w{2})(\w{2});", block)
    return {name: (int(r, 16) / 255, int(g, 16) / 255, int(b, 16) / 255) for name, r, g, b in found}


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Return the contrast of WCAG 2.2, from 1 to 21."""

    def luminance(rgb: tuple[float, float, float]) -> float:
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def faint(scheme: dict[str, Any]) -> list[str]:
    """Return the colours with less contrast than level AA asks of text (4.5) and of figures (3)."""
    found = []
    for name in ("text", "muted", "link", "good", "bad"):
        found += [name for ground in ("page", "card", "head") if contrast(scheme[name], scheme[ground]) < 4.5]
    series = [name for name in scheme if re.fullmatch(r"s\d", name)] + ["load", "compute", "wait", "comm"]
    return found + [name for name in series if contrast(scheme[name], scheme["card"]) < 3]


def test_contrast_in_both_schemes() -> None:
    style = Path(page.__file__).with_name("style.css").read_text(encoding="utf-8")
    light, dark = (colours(block) for block in re.findall(r":root \{([^}]*)\}", style))
    assert set(light) == set(dark)
    assert len(light) > 15
    assert (faint(light), faint(dark)) == ([], [])
    assert contrast((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)) == pytest.approx(21)
    assert faint({**light, "muted": light["rule"], "s1": light["rule"]}) == ["muted", "muted", "muted", "s1"]
