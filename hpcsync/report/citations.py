"""Papers behind a run, as BibTeX: its paradigm, its compression, and its choice of k and batch sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcsync.config.errors import printable
from hpcsync.config.job import Job
from hpcsync.paradigms.papers import ICLR, ICML, Reference, arxiv, meeting, neurips

_ENTRIES = (
    Reference(
        "dutta2020slow",
        "article",
        ("Dutta, Sanghamitra", "Wang, Jianyu", "Joshi, Gauri"),
        "Slow and Stale Gradients Can Win the Race",
        2020,
        arxiv("2003.10579"),
    ),
    Reference(
        "yu2019accelerating",
        "inproceedings",
        ("Yu, Huihuang", "Zhu, Zongwei", "Chen, Xianglan", "Cheng, Yuming", "Hu, Yahui", "Li, Xi"),
        "Accelerating Distributed Training in Heterogeneous Clusters via a Straggler-Aware Parameter Server",
        2019,
        meeting("IEEE International Conference on High Performance Computing and Communications (HPCC)"),
    ),
    Reference(
        "chen2020semi",
        "inproceedings",
        ("Chen, Chen", "Weng, Qizhen", "Wang, Wei", "Li, Baochun", "Li, Bo"),
        "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments",
        2020,
        meeting("ACM Symposium on Cloud Computing (SoCC)"),
    ),
    Reference(
        "ye2020dbs",
        "article",
        ("Ye, Qing", "Zhou, Yuhao", "Shi, Mingjia", "Sun, Yanan", "Lv, Jiancheng"),
        "DBS: Dynamic Batch Size For Distributed Deep Neural Network Training",
        2020,
        arxiv("2007.11831"),
    ),
    # ---- compression ----
    Reference(
        "aji2017sparse",
        "inproceedings",
        ("Aji, Alham Fikri", "Heafield, Kenneth"),
        "Sparse Communication for Distributed Gradient Descent",
        2017,
        meeting(
            "Proceedings of the 2017 Conference on Empirical Methods in Natural Language Processing (EMNLP)", "440--445"
        ),
    ),
    Reference(
        "stich2018sparsified",
        "inproceedings",
        ("Stich, Sebastian U.", "Cordonnier, Jean-Baptiste", "Jaggi, Martin"),
        "Sparsified SGD with Memory",
        2018,
        neurips(31),
    ),
    Reference(
        "lin2018deep",
        "inproceedings",
        ("Lin, Yujun", "Han, Song", "Mao, Huizi", "Wang, Yu", "Dally, William J."),
        "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
        2018,
        meeting(ICLR),
    ),
    Reference(
        "alistarh2017qsgd",
        "inproceedings",
        ("Alistarh, Dan", "Grubic, Demjan", "Li, Jerry", "Tomioka, Ryota", "Vojnovic, Milan"),
        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        2017,
        neurips(30),
    ),
    Reference(
        "seide2014onebit",
        "inproceedings",
        ("Seide, Frank", "Fu, Hao", "Droppo, Jasha", "Li, Gang", "Yu, Dong"),
        "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs",
        2014,
        meeting("Interspeech", "1058--1062"),
    ),
    Reference(
        "bernstein2018signsgd",
        "inproceedings",
        ("Bernstein, Jeremy", "Wang, Yu-Xiang", "Azizzadenesheli, Kamyar", "Anandkumar, Animashree"),
        "signSGD: Compressed Optimisation for Non-Convex Problems",
        2018,
        meeting(ICML.format("35th"), "560--569", "80"),
    ),
    Reference(
        "karimireddy2019error",
        "inproceedings",
        ("Karimireddy, Sai Praneeth", "Rebjock, Quentin", "Stich, Sebastian U.", "Jaggi, Martin"),
        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        2019,
        meeting(ICML.format("36th"), "3252--3261", "97"),
    ),
    Reference(
        "vogels2019powersgd",
        "inproceedings",
        ("Vogels, Thijs", "Karimireddy, Sai Praneeth", "Jaggi, Martin"),
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        2019,
        neurips(32),
    ),
    Reference(
        "micikevicius2018mixed",
        "inproceedings",
        (
            "Micikevicius, Paulius",
            "Narang, Sharan",
            "Alben, Jonah",
            "Diamos, Gregory",
            "Elsen, Erich",
            "Garcia, David",
            "Ginsburg, Boris",
            "Houston, Michael",
            "Kuchaiev, Oleksii",
            "Venkatesh, Ganesh",
            "Wu, Hao",
        ),
        "Mixed Precision Training",
        2018,
        meeting(ICLR),
    ),
    Reference(
        "kalamkar2019study",
        "article",
        ("Kalamkar, Dhiraj", "Mudigere, Dheevatsa", "Mellempudi, Naveen", "others"),
        "A Study of BFLOAT16 for Deep Learning Training",
        2019,
        arxiv("1905.12322"),
    ),
)
REFERENCES = {entry.key: entry for entry in _ENTRIES}

COMPRESSIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "top-k": ("aji2017sparse", "stich2018sparsified"),
    "random-k": ("stich2018sparsified",),
    "dgc": ("lin2018deep",),
    "qsgd": ("alistarh2017qsgd",),
    "one-bit": ("seide2014onebit",),
    "sign": ("bernstein2018signsgd", "karimireddy2019error"),
    "powersgd": ("vogels2019powersgd",),
    "fp16": ("micikevicius2018mixed",),
    "bf16": ("kalamkar2019study",),
}
CHOICES_OF_K = {"loss": ("dutta2020slow",), "state": ("yu2019accelerating",), "throughput": ("yu2019accelerating",)}
BATCHES_BY_SPEED = ("yu2019accelerating", "chen2020semi", "ye2020dbs")


def references(job: Job) -> dict[str, tuple[Reference, ...]]:
    """Return the papers behind a job.

    Returns
    -------
    dict
        Maps a part of the job, such as ``paradigm dssp``, to its papers. A paper is listed once, with the first part
        that it describes; a part without further papers is left out.
    """
    named: set[str] = set()
    found = {}
    for part, papers in _parts(job).items():
        if new := tuple(paper for paper in papers if paper.key not in named):
            found[part] = new
            named.update(paper.key for paper in new)
    return found


def _parts(job: Job) -> dict[str, tuple[Reference, ...]]:
    """Return the papers behind each part of the job."""
    paradigm = job.paradigm
    parts = {f"paradigm {paradigm.name}": paradigm.papers}
    if rules := paradigm.k_rules:
        parts[f"k by {' and '.join(rules)}"] = tuple(paper for rule in rules for paper in _papers(CHOICES_OF_K[rule]))
    if job.batches.policy != "equal":
        parts[f"batch sizes {job.batches.policy}"] = _papers(BATCHES_BY_SPEED)
    parts[f"compression {job.compression.name}"] = _papers(COMPRESSIONS[job.compression.name])
    return parts


def _papers(keys: tuple[str, ...]) -> tuple[Reference, ...]:
    return tuple(REFERENCES[key] for key in keys)


_VERSIONS = {"python_version": "Python", "torch_version": "PyTorch", "numpy_version": "NumPy"}


def software(attributes: Mapping[str, Any]) -> Reference:
    """Return the entry of hpcsync itself, with the versions that the root attributes of a trace record."""
    title = "hpcsync: PyTorch training under many synchronisation paradigms on MPI ranks and in virtual time"
    commit = attributes.get("git_commit") or ""
    version = f"Version {attributes.get('hpcsync_version', 'unknown')}" + (f", commit {commit}" if commit else "")
    parts = [f"{name} {found}" for key, name in _VERSIONS.items() if (found := attributes.get(key))]
    if library := str(attributes.get("mpi_library") or ""):
        parts.append(" ".join(re.split(r",|\\n", library)[0].split()))  # the reader of traces escapes line ends
    note = printable(version + (f"; with {', '.join(parts)}" if parts else ""))
    fields = {"howpublished": "Computer software", "note": note}
    return Reference("hpcsync", "misc", ("{The hpcsync developers}",), title, None, fields)


def bibtex(reference: Reference) -> str:
    """Return the entry in BibTeX, without a final line break. The title keeps its capitals."""
    fields = {
        "author": " and ".join(reference.authors),
        "title": f"{{{reference.title}}}",
        **reference.fields,
        **({} if reference.year is None else {"year": str(reference.year)}),
    }
    lines = [f"  {name} = {{{text}}}," for name, text in fields.items()]
    return "\n".join([f"@{reference.kind}{{{reference.key},", *lines, "}"])
