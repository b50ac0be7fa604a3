"""Numbers, durations and nouns in the text of reports."""

from __future__ import annotations

TO_LAST_ITERATION = "of the time to a worker's last iteration, not to the run's end"  # what shares of time are


def rounded(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, or whole if it has as many before the point; with commas."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def hours(seconds: float) -> str:
    """Return a duration as H:MM:SS."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}"


def plural(n: int, words: str) -> str:
    """Return a number with its noun, the first of the words."""
    if n == 1:
        return f"1 {words}"
    first, space, rest = words.partition(" ")
    return f"{n:,} {first}s{space}{rest}"
