"""The progress line: now and then, and what is known by then."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from hpcsync.progress import Progress


def coordinator(loss=0.25, accuracy=math.nan):
    return SimpleNamespace(samples=1234, version=56, last_loss=loss, last_accuracy=accuracy)


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(text) -> Progress:
    return Progress(Console(file=text, width=120, highlight=False))


def test_a_line_at_most_every_two_seconds(progress, text):
    said = []
    for tenths in range(101):
        progress.show(tenths / 10, coordinator())
        if len(text.getvalue().splitlines()) > len(said):
            said.append(tenths / 10)
    assert said == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_after_a_long_pause_the_next_line_is_two_seconds_later(progress, text):
    for now_s in (7.0, 8.0, 8.9, 9.0):
        progress.show(now_s, coordinator())
    assert [float(line.split()[0]) for line in text.getvalue().splitlines()] == [7.0, 9.0]


def test_the_line_says_how_far_the_run_is(progress, text):
    progress.show(2.5, coordinator())
    assert text.getvalue().split() == "2.5 s 1234 samples 56 updates loss 0.25".split()


def test_on_a_terminal_one_line_changes_and_is_gone_in_the_end(text):
    progress = Progress(Console(file=text, width=120, force_terminal=True, color_system=None))
    for tenths in range(11):
        progress.show(tenths / 10, coordinator())
    progress.close()
    progress.close()
    assert 3 <= text.getvalue().count("1234 samples") <= 4  # at 0.3, 0.6, 0.9; rich may say the last one again
    assert text.getvalue().rstrip().endswith("\x1b[2K")


def test_accuracy_once_it_is_known(progress, text):
    progress.show(2.5, coordinator(accuracy=0.5))
    assert text.getvalue().split()[-2:] == ["accuracy", "0.5000"]
