"""References: every paradigm and codec has one, and a run names those of its parts."""

import re
from importlib import import_module

import pytest

from hpcsync.config.errors import printable
from hpcsync.config.overrides import KINDS
from hpcsync.paradigms import OPTIONS
from hpcsync.paradigms.papers import Reference
from hpcsync.report.citations import COMPRESSIONS, REFERENCES, bibtex, references, software
from tests.unit.jobs import REQUIRED, make_job


def test_every_paradigm_and_every_codec_has_a_citation():
    assert list(OPTIONS) == KINDS["paradigm"]
    assert all(OPTIONS[name](**REQUIRED.get(name, {})).papers for name in OPTIONS)
    assert list(COMPRESSIONS) == KINDS["compression"]
    assert [name for name, keys in COMPRESSIONS.items() if not keys] == ["none"]
    assert {key for keys in COMPRESSIONS.values() for key in keys} <= set(REFERENCES)


MODULES = [vars(import_module(options.__module__)) for options in OPTIONS.values()]
DECLARED = [found for module in MODULES for found in module.values() if isinstance(found, Reference)]
PAPERS = REFERENCES | {paper.key: paper for paper in DECLARED}


def test_papers_of_paradigms_are_found():
    assert {"ho2013more", "assran2019stochastic"} <= PAPERS.keys()
    assert REFERENCES.keys() & {paper.key for paper in DECLARED} == set(), "declared twice"


@pytest.mark.parametrize("reference", PAPERS.values(), ids=PAPERS)
def test_an_entry_is_complete_and_its_key_names_author_and_year(reference):
    family = reference.authors[0].split(",")[0].lower()
    assert re.fullmatch(rf"{family}{reference.year}[a-z]+", reference.key)
    assert all(re.fullmatch(r"[^,{}]+, [^,{}]+", author) for author in reference.authors if author != "others")
    assert ("journal" if reference.kind == "article" else "booktitle") in reference.fields
    text = bibtex(reference)
    assert text.count("{") == text.count("}") and text.startswith(f"@{reference.kind}{{{reference.key},\n")
    assert text.isascii() and not re.search(r"[%&#_$]", text)


def cited(**tables):
    return {part: [paper.key for paper in papers] for part, papers in references(make_job(**tables)).items()}


def test_a_run_names_the_papers_of_its_parts():
    dssp = {"name": "dssp", "staleness_min": 3, "staleness_max": 15}
    assert cited(paradigm=dssp) == {"paradigm dssp": ["zhao2019dynamic"]}
    assert cited(paradigm={"name": "asp"}, compression={"name": "top-k"}) == {
        "paradigm asp": ["dean2012large"],
        "compression top-k": ["aji2017sparse", "stich2018sparsified"],
    }
    assert cited(paradigm={"name": "k-sync", "k": "min"}, batches={"policy": "equal-finish"}) == {
        "paradigm k-sync": ["dutta2018slow"],
        "k by loss and state": ["dutta2020slow", "yu2019accelerating"],  # which also describes batches by speed
        "batch sizes equal-finish": ["chen2020semi", "ye2020dbs"],
    }


def test_variants_have_their_own_papers():
    assert cited(paradigm={"name": "local-sgd", "steps": 4}) == {"paradigm local-sgd": ["stich2019local"]}
    diloco = {"name": "local-sgd", "steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    assert cited(paradigm=diloco)["paradigm local-sgd"] == ["stich2019local", "douillard2023diloco"]
    assert cited(paradigm={"name": "gossip", "mode": "pull"})["paradigm gossip"] == ["jin2016how"]
    decoupled = [cited(paradigm={"name": "async-diloco", **keys}) for keys in ({"quorum": 2}, {"grace_s": 0.1}, {})]
    papers = ["liu2024asynchronous", "douillard2023diloco", "douillard2026decoupled"]
    assert [each["paradigm async-diloco"] for each in decoupled] == [papers, papers, papers[:2]]
    push_sum = cited(paradigm={"name": "gossip", "mode": "push-sum"})
    assert push_sum["paradigm gossip"] == ["assran2019stochastic", "jin2016how"]


def test_the_software_is_cited_with_the_versions_of_the_run():
    text = bibtex(software({"hpcsync_version": "1.2.3"}))
    assert "author = {{The hpcsync developers}}," in text and "note = {Version 1.2.3}," in text
    versions = {
        "python_version": "3.11.7",
        "torch_version": "2.13.0+cpu",
        "mpi_library": "Open MPI v5.0.11, package: x",
    }
    text = bibtex(software({"hpcsync_version": "1.2.3", "git_commit": "abc", **versions}))
    assert "Version 1.2.3, commit abc; with Python 3.11.7, PyTorch 2.13.0+cpu, Open MPI v5.0.11}" in text


def test_of_an_mpi_library_the_first_line_is_cited():
    lines = printable("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25")  # as the reader returns them
    assert "note = {Version 1.2.3; with MPICH Version: 5.0.2}," in bibtex(
        software({"hpcsync_version": "1.2.3", "mpi_library": lines})
    )
