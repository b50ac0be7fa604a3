"""Command `hpcsync cite`: the papers behind a run, as BibTeX."""

from __future__ import annotations

from pathlib import Path


def main(path: Path) -> None:
    """Print the entries, each below a line that names the part it describes."""
    from hpcsync.report.citations import bibtex, references, software
    from hpcsync.trace.reader import opened

    with opened(path) as trace:
        parts, attributes = references(trace.job), trace.attributes
    for part, papers in {**parts, "software": (software(attributes),)}.items():
        print(f"% {part}\n" + "\n\n".join(map(bibtex, papers)) + "\n")
