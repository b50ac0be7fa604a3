"""Results of audit checks, and comparisons that several of them make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpcsync.trace.schema import Rows

SAME = 1e-9  # relative difference of floats that are computed in another order
SAME_TIME_S = 1e-6  # far above the rounding of float64 seconds, below any difference that matters
DURATIONS = ("load_s", "compute_s", "wait_s", "comm_s")  # columns of /pushes and /exchanges

# One property of many rows: which rows violate it, bool of shape (n_rows,), and a description of one such row.
Part = tuple[Rows, Callable[[int], str]]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes
    ----------
    n_checked
        Number of rows (or of the objects that the name refers to) examined.
    detail
        The first failure, or a remark.
    """

    name: str
    passed: bool
    n_checked: int
    detail: str = ""


def check_rows(name: str, wrong: Rows, describe: Callable[[int], str]) -> Check:
    """Return the check of one property of many rows.

    Parameters
    ----------
    wrong
        Rows that violate the property, bool of shape (n_rows,).
    describe
        Maps a row number to the description of its failure.
    """
    if not wrong.any():
        return Check(name, True, len(wrong))
    return Check(name, False, len(wrong), f"{describe(int(wrong.argmax()))} ({int(wrong.sum())} of {len(wrong)} fail)")


def check_all(name: str, *parts: Part) -> Check:
    """Return one check of several properties.

    The detail is that of the first property that fails.
    """
    checks = [check_rows(name, wrong, describe) for wrong, describe in parts]
    failed = [check for check in checks if not check.passed]
    n_checked = sum(check.n_checked for check in checks)
    return Check(name, not failed, n_checked, failed[0].detail if failed else "")


def describe_columns(table: str, rows: Rows, *columns: str) -> Callable[[int], str]:
    """Return a function that maps a row number to the values of `columns` in that row of `table`."""
    return lambda i: f"{table} row {i}: " + ", ".join(f"{column} {rows[column][i]}" for column in columns)


def alike(a: Rows, b: Rows) -> Rows:
    """Return which floats are equal but for the order of their computation; NaN equals itself."""
    return np.isclose(a, b, rtol=SAME, atol=0.0, equal_nan=True)


def repeated(keys: Rows) -> Rows:
    """Return which elements are equal to an earlier one."""
    again = np.ones(len(keys), bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again
