"""Papers behind a run, as BibTeX: its paradigm, its compression, and its choice of k and batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcsync.config.job import Job
from hpcsync.config.paradigms import FirstKOptions, GossipOptions, LocalSgdOptions


class Reference(NamedTuple):
    """Entry of a bibliography; `fields` are further BibTeX fields, such as the venue."""

    key: str
    kind: str
    authors: tuple[str, ...]
    title: str
    year: int | None
    fields: dict[str, str]


def _journal(journal: str, volume: str, pages: str, number: str = "") -> dict[str, str]:
    return {"journal": journal, "volume": volume, **({"number": number} if number else {}), "pages": pages}


def _arxiv(number: str) -> dict[str, str]:
    return {"journal": f"arXiv preprint arXiv:{number}"}


def _neurips(volume: int) -> dict[str, str]:
    return {"booktitle": "Advances in Neural Information Processing Systems", "volume": str(volume)}


def _meeting(name: str, pages: str = "", volume: str = "") -> dict[str, str]:
    series = {"series": "Proceedings of Machine Learning Research", "volume": volume} if volume else {}
    return {"booktitle": name, **series, **({"pages": pages} if pages else {})}


_ICLR = "International Conference on Learning Representations"
_ICML = "Proceedings of the {} International Conference on Machine Learning"

_ENTRIES = (
    Reference(
        "valiant1990bridging",
        "article",
        ("Valiant, Leslie G.",),
        "A Bridging Model for Parallel Computation",
        1990,
        _journal("Communications of the ACM", "33", "103--111", "8"),
    ),
    Reference(
        "dean2012large",
        "inproceedings",
        (
            "Dean, Jeffrey",
            "Corrado, Greg S.",
            "Monga, Rajat",
            "Chen, Kai",
            "Devin, Matthieu",
            "Le, Quoc V.",
            "Mao, Mark Z.",
            "Ranzato, Marc'Aurelio",
            "Senior, Andrew",
            "Tucker, Paul",
            "Yang, Ke",
            "Ng, Andrew Y.",
        ),
        "Large Scale Distributed Deep Networks",
        2012,
        _neurips(25),
    ),
    Reference(
        "ho2013more",
        "inproceedings",
        (
            "Ho, Qirong",
            "Cipar, James",
            "Cui, Henggang",
            "Lee, Seunghak",
            "Kim, Jin Kyu",
            "Gibbons, Phillip B.",
            "Gibson, Garth A.",
            "Ganger, Gregory R.",
            "Xing, Eric P.",
        ),
        "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
        2013,
        _neurips(26),
    ),
    Reference(
        "zhao2019dynamic",
        "inproceedings",
        ("Zhao, Xing", "An, Aijun", "Liu, Junfeng", "Chen, Bao Xin"),
        "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning",
        2019,
        _meeting("IEEE 39th International Conference on Distributed Computing Systems (ICDCS)", "1507--1517"),
    ),
    Reference(
        "dutta2018slow",
        "inproceedings",
        ("Dutta, Sanghamitra", "Joshi, Gauri", "Ghosh, Soumyadip", "Dube, Parijat", "Nagpurkar, Priya"),
        "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in Distributed SGD",
        2018,
        _meeting(
            "Proceedings of the 21st International Conference on Artificial Intelligence and Statistics (AISTATS)",
            "803--812",
            "84",
        ),
    ),
    Reference(
        "dutta2020slow",
        "article",
        ("Dutta, Sanghamitra", "Wang, Jianyu", "Joshi, Gauri"),
        "Slow and Stale Gradients Can Win the Race",
        2020,
        _arxiv("2003.10579"),
    ),
    Reference(
        "yu2019accelerating",
        "inproceedings",
        ("Yu, Huihuang", "Zhu, Zongwei", "Chen, Xianglan", "Cheng, Yuming", "Hu, Yahui", "Li, Xi"),
        "Accelerating Distributed Training in Heterogeneous Clusters via a Straggler-Aware Parameter Server",
        2019,
        _meeting("IEEE International Conference on High Performance Computing and Communications (HPCC)"),
    ),
    Reference(
        "zhang2015deep",
        "inproceedings",
        ("Zhang, Sixin", "Choromanska, Anna", "LeCun, Yann"),
        "Deep Learning with Elastic Averaging SGD",
        2015,
        _neurips(28),
    ),
    Reference(
        "shen2024ashl",
        "article",
        (
            "Shen, Zhaoyan",
            "Tang, Qingxiang",
            "Zhou, Tianren",
            "Zhang, Yuhao",
            "Jia, Zhiping",
            "Yu, Dongxiao",
            "Zhang, Zhiyong",
            "Li, Bingzhe",
        ),
        "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for Heterogeneous Environments",
        2024,
        {**_journal("IEEE Transactions on Computers", "73", "30--43", "1"), "doi": "10.1109/TC.2023.3315847"},
    ),
    Reference(
        "hu2020distributed",
        "inproceedings",
        ("Hu, Hanpeng", "Wang, Dan", "Wu, Chuan"),
        "Distributed Machine Learning through Heterogeneous Edge Systems",
        2020,
        {
            "booktitle": "Proceedings of the AAAI Conference on Artificial Intelligence",
            "volume": "34",
            "number": "05",
            "pages": "7179--7186",
            "doi": "10.1609/aaai.v34i05.6207",
        },
    ),
    Reference(
        "patarasuk2009bandwidth",
        "article",
        ("Patarasuk, Pitch", "Yuan, Xin"),
        "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
        2009,
        _journal("Journal of Parallel and Distributed Computing", "69", "117--124", "2"),
    ),
    Reference(
        "stich2019local",
        "inproceedings",
        ("Stich, Sebastian U.",),
        "Local SGD Converges Fast and Communicates Little",
        2019,
        _meeting(_ICLR),
    ),
    Reference(
        "douillard2023diloco",
        "article",
        (
            "Douillard, Arthur",
            "Feng, Qixuan",
            "Rusu, Andrei A.",
            "Chhaparia, Rachita",
            "Donchev, Yani",
            "Kuncoro, Adhiguna",
            "Ranzato, Marc'Aurelio",
            "Szlam, Arthur",
            "Shen, Jiajun",
        ),
        "DiLoCo: Distributed Low-Communication Training of Language Models",
        2023,
        _arxiv("2311.08105"),
    ),
    Reference(
        "jin2016how",
        "article",
        ("Jin, Peter H.", "Yuan, Qiaochu", "Iandola, Forrest", "Keutzer, Kurt"),
        "How to scale distributed deep learning?",
        2016,
        _arxiv("1611.04581"),
    ),
    Reference(
        "assran2019stochastic",
        "inproceedings",
        ("Assran, Mahmoud", "Loizou, Nicolas", "Ballas, Nicolas", "Rabbat, Michael"),
        "Stochastic Gradient Push for Distributed Deep Learning",
        2019,
        _meeting(_ICML.format("36th"), "344--353", "97"),
    ),
    Reference(
        "wu2018stanza",
        "article",
        ("Wu, Xiaorui", "Xu, Hong", "Li, Bo", "Xiong, Yongqiang"),
        "Stanza: Layer Separation for Distributed Training in Deep Learning",
        2018,
        _arxiv("1812.10624"),
    ),
    # ---- compression ----
    Reference(
        "aji2017sparse",
        "inproceedings",
        ("Aji, Alham Fikri", "Heafield, Kenneth"),
        "Sparse Communication for Distributed Gradient Descent",
        2017,
        _meeting(
            "Proceedings of the 2017 Conference on Empirical Methods in Natural Language Processing (EMNLP)", "440--445"
        ),
    ),
    Reference(
        "stich2018sparsified",
        "inproceedings",
        ("Stich, Sebastian U.", "Cordonnier, Jean-Baptiste", "Jaggi, Martin"),
        "Sparsified SGD with Memory",
        2018,
        _neurips(31),
    ),
    Reference(
        "lin2018deep",
        "inproceedings",
        ("Lin, Yujun", "Han, Song", "Mao, Huizi", "Wang, Yu", "Dally, William J."),
        "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
        2018,
        _meeting(_ICLR),
    ),
    Reference(
        "alistarh2017qsgd",
        "inproceedings",
        ("Alistarh, Dan", "Grubic, Demjan", "Li, Jerry", "Tomioka, Ryota", "Vojnovic, Milan"),
        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        2017,
        _neurips(30),
    ),
    Reference(
        "seide2014onebit",
        "inproceedings",
        ("Seide, Frank", "Fu, Hao", "Droppo, Jasha", "Li, Gang", "Yu, Dong"),
        "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs",
        2014,
        _meeting("Interspeech", "1058--1062"),
    ),
    Reference(
        "bernstein2018signsgd",
        "inproceedings",
        ("Bernstein, Jeremy", "Wang, Yu-Xiang", "Azizzadenesheli, Kamyar", "Anandkumar, Animashree"),
        "signSGD: Compressed Optimisation for Non-Convex Problems",
        2018,
        _meeting(_ICML.format("35th"), "560--569", "80"),
    ),
    Reference(
        "karimireddy2019error",
        "inproceedings",
        ("Karimireddy, Sai Praneeth", "Rebjock, Quentin", "Stich, Sebastian U.", "Jaggi, Martin"),
        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        2019,
        _meeting(_ICML.format("36th"), "3252--3261", "97"),
    ),
    Reference(
        "vogels2019powersgd",
        "inproceedings",
        ("Vogels, Thijs", "Karimireddy, Sai Praneeth", "Jaggi, Martin"),
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        2019,
        _neurips(32),
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
        _meeting(_ICLR),
    ),
    Reference(
        "kalamkar2019study",
        "article",
        ("Kalamkar, Dhiraj", "Mudigere, Dheevatsa", "Mellempudi, Naveen", "others"),
        "A Study of BFLOAT16 for Deep Learning Training",
        2019,
        _arxiv("1905.12322"),
    ),
)
REFERENCES = {entry.key: entry for entry in _ENTRIES}

_FIRST_K = ("dutta2018slow",)
PARADIGMS: dict[str, tuple[str, ...]] = {
    "bsp": ("valiant1990bridging",),
    "asp": ("dean2012large",),
    "ssp": ("ho2013more",),
    "dssp": ("zhao2019dynamic",),
    "k-sync": _FIRST_K,
    "k-batch-sync": _FIRST_K,
    "k-async": _FIRST_K,
    "k-batch-async": _FIRST_K,
    "easgd": ("zhang2015deep",),
    "ashl": ("shen2024ashl",),
    "adsp": ("hu2020distributed",),
    "allreduce": ("patarasuk2009bandwidth",),
    "local-sgd": ("stich2019local",),
    "gossip": ("jin2016how",),
    "stanza": ("wu2018stanza",),
}
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
CHOICES_OF_K = {"loss": ("dutta2020slow",), "state": ("yu2019accelerating",)}
BATCHES_BY_SPEED = ("yu2019accelerating",)


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
    for part, keys in _parts(job).items():
        if new := [key for key in keys if key not in named]:
            found[part] = tuple(REFERENCES[key] for key in new)
            named.update(new)
    return found


def _parts(job: Job) -> dict[str, tuple[str, ...]]:
    """Return the keys of the papers behind each part of the job."""
    paradigm = job.paradigm
    keys: tuple[str, ...] = PARADIGMS[paradigm.name]
    if isinstance(paradigm, LocalSgdOptions) and (paradigm.outer_lr, paradigm.outer_momentum) != (1.0, 0.0):
        keys = (*keys, "douillard2023diloco")
    if isinstance(paradigm, GossipOptions) and paradigm.mode == "push-sum":
        keys = ("assran2019stochastic", *keys)
    parts: dict[str, tuple[str, ...]] = {f"paradigm {paradigm.name}": keys}
    if isinstance(paradigm, FirstKOptions) and not isinstance(paradigm.k, int):
        rules = ("loss", "state") if paradigm.k == "min" else (paradigm.k,)
        parts[f"k by {' and '.join(rules)}"] = tuple(key for rule in rules for key in CHOICES_OF_K[rule])
    if job.batches.policy != "equal":
        parts[f"batch sizes {job.batches.policy}"] = BATCHES_BY_SPEED
    parts[f"compression {job.compression.name}"] = COMPRESSIONS[job.compression.name]
    return parts


_VERSIONS = {"python_version": "Python", "torch_version": "PyTorch", "numpy_version": "NumPy"}


def software(attributes: Mapping[str, Any]) -> Reference:
    """Return the entry of hpcsync itself, with the versions that the root attributes of a trace record."""
    title = "hpcsync: PyTorch training under many synchronisation paradigms on MPI ranks and in virtual time"
    commit = attributes.get("git_commit") or ""
    version = f"Version {attributes.get('hpcsync_version', 'unknown')}" + (f", commit {commit}" if commit else "")
    parts = [f"{name} {found}" for key, name in _VERSIONS.items() if (found := attributes.get(key))]
    if library := str(attributes.get("mpi_library") or ""):
        parts.append(library.partition(",")[0])
    fields = {"howpublished": "Computer software", "note": version + (f"; with {', '.join(parts)}" if parts else "")}
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
