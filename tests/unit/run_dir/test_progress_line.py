"""Progress line: intervals and contents."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from hpcsync.config.job import Stop
from hpcsync.run_dir import progress_line
from hpcsync.run_dir.progress_line import Progress
from hpcsync.system.rank_environment import TERMINAL


def coordinator(loss=0.25, accuracy=math.nan, samples=1234):
    return SimpleNamespace(samples=samples, version=56, last_loss=loss, last_accuracy=accuracy)


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


class Clock:
    """Clock that shows the time it was last set to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(text, clock) -> Progress:
    return Progress(Console(file=text, width=120, highlight=False), clock=clock)


def test_a_line_at_most_every_two_seconds(progress, clock, text):
    said = []
    for tenths in range(101):
        clock.now_s = tenths / 10
        progress.show(1e3 * clock.now_s, coordinator())  # a simulated run's own time passes as it likes
        if len(text.getvalue().splitlines()) > len(said):
            said.append(tenths / 10)
    assert said == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_interval_after_a_long_pause(progress, clock, text):
    for clock.now_s in (7.0, 8.0, 8.9, 9.0):
        progress.show(clock.now_s, coordinator())
    assert [float(line.split()[0]) for line in text.getvalue().splitlines()] == [7.0, 9.0]


def test_contents_of_the_line(progress, clock, text):
    clock.now_s = 2.5
    progress.show(2.5, coordinator())
    assert text.getvalue().split() == "2.5 s 1,234 samples loss 0.25".split()


def test_on_a_terminal_one_line_changes_and_is_removed_at_the_end(text, clock):
    progress = Progress(Console(file=text, width=120, force_terminal=True, color_system=None), clock=clock)
    for tenths in range(11):
        clock.now_s = tenths / 10
        progress.show(clock.now_s, coordinator())
    progress.close()
    progress.close()
    assert 3 <= text.getvalue().count("1,234 samples") <= 4  # at 0.3, 0.6, 0.9; rich may say the last one again
    assert "56 updates  loss 0.25" in text.getvalue()
    assert text.getvalue().rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize("terminal", [False, True])
def test_share_rate_and_time_left(text, clock, terminal):
    """A resumed run whose own time passes at half the speed of the clock; its first second was slow."""
    console = Console(file=text, width=120, force_terminal=terminal, color_system=None, highlight=False)
    progress = Progress(console, Stop(samples=10_000), clock=clock)
    for clock.now_s in range(101):
        samples = 2000 + max(0, clock.now_s - 1) * 20
        progress.show(clock.now_s / 2, coordinator(samples=samples))
    progress.close()
    assert "40 %  40 samples/s  0:05:01 left" in text.getvalue()  # 600 / 15 s; (10000 - 3980) / 20 s
    assert ("━" in text.getvalue()) == terminal


def test_the_rate_is_that_of_the_last_half_minute(progress, clock, text):
    for clock.now_s in range(75):
        progress.show(clock.now_s, coordinator(samples=10 * clock.now_s + 30 * max(0, clock.now_s - 60)))
    assert " 24 samples/s" in text.getvalue().splitlines()[-1]  # at 74 s: 16 s at 10 and 14 s at 40 samples/s


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_limit_no_share_is_known(text, clock, terminal):
    console = Console(file=text, width=120, force_terminal=terminal, color_system=None, highlight=False)
    progress = Progress(console, Stop(target_loss=0.1), clock=clock)
    for clock.now_s in range(5):
        progress.show(clock.now_s, coordinator(samples=100 * clock.now_s))
    progress.close()
    if terminal:
        assert "100 samples/s" in text.getvalue() and "━" not in text.getvalue()
    else:
        said = [line.split() for line in text.getvalue().splitlines()]
        assert said == [f"{n}.0 s {n}00 samples 100 samples/s loss 0.25".split() for n in (2, 4)]


@pytest.mark.parametrize(("per_s", "samples"), [(0, 100), (1, 0)])
def test_no_rate_is_shown_while_time_or_samples_stand_still(progress, clock, text, per_s, samples):
    for clock.now_s in range(5):
        progress.show(per_s * clock.now_s, coordinator(samples=samples * clock.now_s))
    assert "samples/s" not in text.getvalue() and text.getvalue().count("loss") == 2


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("132", 132)])
def test_a_rank_has_the_terminal_of_its_launcher(monkeypatch, columns, width):
    monkeypatch.setattr(progress_line, "under_launcher", lambda: True)
    monkeypatch.delenv(TERMINAL, raising=False)
    if columns:
        monkeypatch.setenv(TERMINAL, columns)
    found = progress_line.console()
    assert (found.is_terminal, found.width) == (columns is not None, width)


def test_a_line_fits_into_80_columns(text, clock):
    progress = Progress(Console(file=text, width=120, highlight=False), Stop(samples=2_000_000), clock=clock)
    for clock.now_s in range(0, 7):
        samples = 1_000_000 + 10_000 * clock.now_s
        progress.show(10_000.0 + clock.now_s, coordinator(loss=0.001234, accuracy=0.9, samples=samples))
    lines = text.getvalue().splitlines()
    assert lines[-1] == "10006.0 s  53 %  10,000 samples/s  0:01:34 left  loss 0.001234  accuracy 0.9000"
    assert max(map(len, lines)) <= 80


def test_accuracy_once_it_is_known(progress, clock, text):
    clock.now_s = 2.5
    progress.show(2.5, coordinator(accuracy=0.5))
    assert text.getvalue().split()[-2:] == ["accuracy", "0.5000"]
