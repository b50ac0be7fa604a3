"""The outcome of one check of an audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Which rows are wrong, bool of shape (n_rows,), and what is wrong with one.
Part = tuple[np.ndarray, Callable[[int], str]]


@dataclass(frozen=True)
class Check:
    """n_checked: rows (or whatever the name speaks of) looked at. detail: the first failure, or a remark."""

    name: str
    passed: bool
    n_checked: int
    detail: str = ""


def check_rows(name: str, wrong: np.ndarray, describe: Callable[[int], str]) -> Check:
    """A check of one property in many rows."""
    if not wrong.any():
        return Check(name, True, len(wrong))
    return Check(name, False, len(wrong), f"{describe(int(wrong.argmax()))} ({int(wrong.sum())} of {len(wrong)} fail)")


def check_all(name: str, *parts: Part) -> Check:
    """A check of several properties under one name; the detail is that of the first part that fails."""
    checks = [check_rows(name, wrong, describe) for wrong, describe in parts]
    failed = [check for check in checks if not check.passed]
    n_checked = sum(check.n_checked for check in checks)
    return Check(name, not failed, n_checked, failed[0].detail if failed else "")


def teller(table: str, rows: np.ndarray, *columns: str) -> Callable[[int], str]:
    """Tells these columns of a row."""
    return lambda i: f"{table} row {i}: " + ", ".join(f"{column} {rows[column][i]}" for column in columns)
