"""The pages on reproductions print what their CSV files contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "analysis" / "figures"
PAGES = sorted((ROOT / "docs" / "reproductions").glob("*.md"))
QUOTING = [  # batch allocation's page has measurements of its own
    page
    for page in sorted((ROOT / "docs" / "paradigms").glob("*.md"))
    if page.stem != "batch-allocation" and "reproductions/" in page.read_text(encoding="utf-8")
]
NUMBER = r"(-?[\d,]*\.?\d+)"
INTERVAL = re.compile(rf"{NUMBER}(?: points| %)? \({NUMBER} to {NUMBER}\)")  # mean (low to high)
VERDICT = re.compile(r"holds|does not(?: hold)?|cannot be told")
COLUMNS = ["mean", "low", "high", "verdict"]


def tables(text: str) -> list[pd.DataFrame]:
    """Return the CSV files that a page links or shows as a figure."""
    stems = dict.fromkeys(re.findall(r"analysis/figures/([\w-]+)\.(?:csv|png)", text))
    return [pd.read_csv(FIGURES / f"{stem}.csv") for stem in stems]


def known(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return mean, low, high and verdict of the claims, and the means and ranges over the seeds of all else."""
    found = [pd.DataFrame(columns=COLUMNS)]
    for frame in frames:
        if set(COLUMNS) <= set(frame):
            found += [
                frame[COLUMNS],
                frame[COLUMNS].assign(mean=-frame["mean"], low=-frame["high"], high=-frame["low"]),
            ]
        elif {"seed", "setting", "arm", "paradigm"} <= set(frame):
            runs = frame.groupby(["setting", "arm", "paradigm"])
            ranges = [runs[column].agg(mean="mean", low="min", high="max") for column in frame.select_dtypes(float)]
            found.append(pd.concat(ranges).assign(verdict=""))
    return pd.concat(found, ignore_index=True)


def same(printed: re.Match[str], rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have this interval, to the printed digits."""
    words = [each.replace(",", "") for each in printed.groups()]
    half = [0.5 * 10.0 ** -len(each.partition(".")[2]) + 1e-9 for each in words]
    apart = np.abs(rows[COLUMNS[:3]].to_numpy(float) - np.array(words, float))
    return rows[(apart <= half).all(axis=1)]


def unknown(text: str, source: str) -> list[str]:
    """Return the intervals of a page that none of the tables of its source contains."""
    rows = known(tables(source))
    return [each.group() for each in INTERVAL.finditer(re.sub(r"\s+", " ", text)) if same(each, rows).empty]


def verdicts(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each interval of a table with its verdict, where a row has one verdict for all, or one for each."""
    for line in text.splitlines():
        cells = line.strip("|").split("|")
        intervals = [match for cell in cells for match in INTERVAL.finditer(cell)]
        found = [VERDICT.findall(cell) for cell in cells if VERDICT.match(cell.strip())]
        if len(found) == 1 and len(found[0]) in (1, len(intervals)):
            words = found[0] * (len(intervals) if len(found[0]) == 1 else 1)
            yield from zip(intervals, words, strict=True)


def wrong_verdicts(text: str) -> list[str]:
    """Return the intervals whose verdict is another one in the tables."""
    rows = known(tables(text))
    return [f"{each.group()}: {word}" for each, word in verdicts(text) if word not in set(same(each, rows)["verdict"])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_interval_of_a_page_is_in_its_tables_with_its_verdict(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown(text, text) == []
    assert wrong_verdicts(text) == []


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.stem)
def test_every_interval_that_a_paradigms_page_quotes_is_in_the_tables_of_a_reproduction(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [each.read_text(encoding="utf-8") for each in PAGES if f"reproductions/{each.name}" in text]
    assert unknown(text, "".join(linked)) == []


def test_a_wrong_last_digit_and_a_wrong_verdict_are_found() -> None:
    text = next(page for page in PAGES if page.stem == "ashl").read_text(encoding="utf-8")
    right, row = "0.76 (0.60 to 0.97)", "| 0.76 (0.60 to 0.97) | cannot be told |"
    assert row in text and len(list(verdicts(text))) > 20
    for wrong in ("0.77 (0.60 to 0.97)", "0.76 (0.61 to 0.97)", "0.76 (0.60 to 0.96)"):
        assert unknown(text.replace(right, wrong), text) == [wrong]
    assert wrong_verdicts(text.replace(row, row.replace("cannot be told", "holds"))) == [f"{right}: holds"]
