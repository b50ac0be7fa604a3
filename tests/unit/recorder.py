"""Traces in memory, for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcsync.trace.schema import TABLES, decisions_dtype


class Recorder:
    """A trace in memory.

    decision_fields: names of further columns of /decisions.
    rows: the table and the values of each row, in the order in which they were appended, so that it can be cut.
    """

    def __init__(self, decision_fields: Sequence[str] = ()) -> None:
        self._dtypes = {**TABLES, "decisions": decisions_dtype(decision_fields)}
        self.rows: list[tuple[str, tuple[Any, ...]]] = []

    def append(self, table: str, row: tuple[Any, ...]) -> None:
        self.rows.append((table, row))

    def amend(self, table: str, back: int, column: str, value: float) -> None:
        place = [at for at, (name, _) in enumerate(self.rows) if name == table][-1 - back]
        row = self.named(table, self.rows[place][1]) | {column: value}
        self.rows[place] = (table, tuple(row.values()))

    def flush(self) -> None:
        pass

    def of(self, table: str) -> list[tuple[Any, ...]]:
        """Return the rows of a table."""
        return [row for name, row in self.rows if name == table]

    def __getitem__(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table by name of the column."""
        return [self.named(table, row) for row in self.of(table)]

    def named(self, table: str, row: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._dtypes[table].names or (), row, strict=True))

    def array(self, table: str) -> np.ndarray:
        """Return a table as the reader of a trace does."""
        return np.array(self.of(table), self._dtypes[table])


class Nothing:
    """A trace that discards its rows."""

    def append(self, table: str, row: tuple[Any, ...]) -> None:
        pass

    def amend(self, table: str, back: int, column: str, value: float) -> None:
        pass
