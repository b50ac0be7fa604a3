"""Command `hpcsync cite`: the papers behind a run, as BibTeX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Trace file, or the folder of a run.", show_default=False)
    ],
) -> None:
    """Print BibTeX of the papers behind a run.

    An entry of hpcsync follows, with the versions of the run.
    """
    sys.exit(main(trace))


def main(path: Path) -> int:
    """Print the entries, each below a line that names the part it describes; return the exit status."""
    from hpcsync.report.citations import bibtex, references, software
    from hpcsync.trace.reader import TraceError, opened

    try:
        with opened(path) as trace:
            parts, attributes = references(trace.job), trace.attributes
    except TraceError as error:
        print(f"hpcsync: {error}", file=sys.stderr)
        return 2
    for part, papers in {**parts, "software": (software(attributes),)}.items():
        print(f"% {part}\n" + "\n\n".join(map(bibtex, papers)) + "\n")
    return 0
