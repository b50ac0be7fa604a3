"""Candidates of an advice: what they are called, and the factor of the learning rate that each is trained with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcsync.cli import grid
from hpcsync.config.errors import JobError
from hpcsync.paradigms import OPTIONS
from hpcsync.planning.candidates import BY_SPEED, RATES, Candidate

if TYPE_CHECKING:
    from hpcsync.report.summary import Summary

FURTHER = 2  # rates that follow for a candidate whose best one is at an end of those tried
BATCHES = "batches by speed"  # in labels, after a plus, as are codecs
PLUS = " + "


class Trained(NamedTuple):
    """A candidate, the factor of its learning rate, and what it is called."""

    label: str
    candidate: Candidate
    factor: float = 1.0


def best_rates(
    found: Mapping[Trained, Mapping[int, Summary]], n_seeds: int
) -> dict[str, tuple[tuple[float, ...], Trained]]:
    """Return each candidate with its best rate, and its merit."""
    from hpcsync.report.variants import merit

    best: dict[str, tuple[tuple[float, ...], Trained]] = {}
    for trained, runs in found.items():
        of_this = (merit(runs.values(), n_seeds), trained)
        if trained.label not in best or of_this[0] < best[trained.label][0]:
            best[trained.label] = of_this
    return best


class AtAnEnd(NamedTuple):
    """A candidate whose best rate is the largest or smallest of so many tried; `step` is the factor to the next one."""

    best: Trained
    n_tried: int
    step: float


def at_an_end(
    found: Mapping[Trained, Mapping[int, Summary]], n_seeds: int, failed: Iterable[Trained] = ()
) -> dict[str, AtAnEnd]:
    """Return the candidates whose best rate is the largest or smallest of those tried, by label."""
    tried: dict[str, list[float]] = {}
    for trained in (*found, *failed):
        tried.setdefault(trained.label, []).append(trained.factor)
    ends = {}
    for label, (_, best) in best_rates(found, n_seeds).items():
        for end, step in ((max, 2.0), (min, 0.5)):
            if best.factor == end(tried[label]):
                ends[label] = AtAnEnd(best, len(tried[label]), step)
    return ends


def further(ends: Mapping[str, AtAnEnd]) -> list[Trained]:
    """Return the next rates of candidates whose best one is at an end of those tried."""
    most = len(RATES) + FURTHER
    return [best._replace(factor=step * best.factor) for best, n, step in ends.values() if n < most]


def candidate(text: str) -> Candidate:
    """Return the candidate of an option `--paradigm`. Raises JobError for a text that is none."""
    paradigm, *added = text.split(PLUS)
    codecs = [word for word in added if word != BATCHES]
    if len(codecs) > 1 or added.count(BATCHES) > 1:
        raise JobError(f"--paradigm {text}: must have {BATCHES} and a codec once at most")
    compression = {"name": codecs[0]} if codecs else {}
    return Candidate(grid.paradigm_table(paradigm), dict(BY_SPEED) if BATCHES in added else {}, compression)


def label_of(candidate: Candidate) -> str:
    """Return what a candidate is called."""
    added = [BATCHES] if candidate.batches else []
    if candidate.compression:
        added.append(candidate.compression["name"])
    return PLUS.join([grid.label([f"paradigm={grid.in_one_line(_rounded(candidate.paradigm))}"]), *added])


def _rounded(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in table.items()}


def needs_no_options(paradigm: str) -> bool:
    """Return whether all options of a paradigm have defaults."""
    return all(each.default is not MISSING for each in fields(OPTIONS[paradigm]))


def described(trained: Trained) -> str:
    """Return a candidate and its learning rate in words."""
    return f"{trained.label} lr x{trained.factor:g}"


def stem(trained: Trained) -> str:
    """Return the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "=.-" else "-" for letter in described(trained))
