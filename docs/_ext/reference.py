"""Sphinx extension: writes the generated parts of the reference into docs/_generated before the build.

They are the keys of the job file, the options of the command line, the tables of the trace and the paradigms; and the
tables of the benchmarks. Pages include them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmarks
import command_line
import job_file
import paradigms
import trace_tables


def write(folder: Path) -> None:
    """Write every generated part into this folder. Raises ValueError where a key or an option has no description."""
    folder.mkdir(exist_ok=True)
    for part in (job_file, command_line, trace_tables, paradigms, benchmarks):
        for name, text in part.pages().items():
            _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
        path.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "_generated"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
