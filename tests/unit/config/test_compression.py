"""The `[compression]` of the job file: defaults and mistakes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpcsync.compression import CODECS, ErrorFeedback, TensorLayout, create
from hpcsync.compression.dgc import DGC
from hpcsync.config.compression import CodecOptions, DenseOptions
from hpcsync.config.job import Job
from hpcsync.config.overrides import KINDS
from tests.unit.jobs import make_job, refusal


def job(
    name: str, *, paradigm: str | dict[str, Any] = "bsp", optimizer: dict[str, Any] | None = None, **keys: Any
) -> Job:
    tables = {"paradigm": {"name": paradigm} if isinstance(paradigm, str) else paradigm}
    if optimizer is not None:
        tables["optimizer"] = {"name": "sgd", "lr": 0.1, **optimizer}
    return make_job(compression={"name": name, **keys}, **tables)


error = partial(refusal, job)


def options(name: str, **keys: Any) -> dict[str, Any]:
    compression = job(name, **keys).compression
    assert isinstance(compression, CodecOptions)
    return compression.options


def test_nothing_is_compressed_unless_it_is_said() -> None:
    assert make_job().compression == DenseOptions(name="none") == job("none").compression
    assert [make_job().compresses, job("none").compresses, job("fp16").compresses] == [False, False, True]


DEFAULTS: dict[str, dict[str, Any]] = {
    "top-k": {"ratio": 0.01, "error_feedback": True},
    "random-k": {"ratio": 0.01, "error_feedback": True},
    "dgc": {"ratio": 0.01, "momentum": 0.9, "nesterov": False, "warmup": 0},
    "qsgd": {"levels": 127, "bucket": 512, "error_feedback": False},
    "one-bit": {"error_feedback": True},
    "sign": {"error_feedback": True},
    "powersgd": {"rank": 2, "error_feedback": True},
    "fp16": {"error_feedback": False},
    "bf16": {"error_feedback": False},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_options_of_codecs(name: str) -> None:
    assert options(name, gbytes_per_s=2) == DEFAULTS[name]


def test_every_codec_has_its_defaults_here() -> None:
    assert [*DEFAULTS] == KINDS["compression"][1:]
    assert {*DEFAULTS} == {*CODECS}


@pytest.mark.parametrize("name", DEFAULTS)
def test_codecs_accept_their_options(name: str) -> None:
    codec = create(name, TensorLayout([(4, 4), (3,)]), np.float64, **options(name))
    assert isinstance(codec, ErrorFeedback) == DEFAULTS[name].get("error_feedback", False)


def test_dgc_accepts_optional_keys() -> None:
    given: dict[str, Any] = {"clip": 2, "warmup": 6, "warmup_ratios": [0.5, 0.25], "ratio": 0.125}
    codec = create("dgc", TensorLayout([(4, 4)]), np.float32, **options("dgc", **given))
    assert isinstance(codec, DGC)
    assert [codec.ratio_of(i) for i in range(7)] == [0.5] * 3 + [0.25] * 3 + [0.125]
    assert (codec.clip, codec.momentum) == (2.0, 0.9)


@pytest.mark.parametrize("name", ["top-k", "random-k"])
def test_under_ashl_error_feedback_is_off_by_default(name: str) -> None:
    assert [options(name, paradigm=each)["error_feedback"] for each in ("ashl", "adsp", "bsp")] == [
        False,
        *[DEFAULTS[name]["error_feedback"]] * 2,
    ]
    assert options(name, paradigm="ashl", error_feedback=True)["error_feedback"]


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DEFAULTS),
    *((name, {"error_feedback": not keys["error_feedback"]}) for name, keys in DEFAULTS.items() if name != "dgc"),
    ("top-k", {"ratio": 1, "gbytes_per_s": 2.5}),
    ("top-k", {"paradigm": "ashl"}),
    ("random-k", {"paradigm": "ashl", "error_feedback": True}),
    ("dgc", {"momentum": 0, "nesterov": True, "clip": 1, "warmup": 5, "warmup_ratios": [0.25, 1, 0.0625]}),
    ("dgc", {"optimizer": {"momentum": 0}}),
    ("dgc", {"paradigm": "allreduce"}),
    ("powersgd", {"paradigm": "adsp", "optimizer": {"momentum": 0.9}}),
]


@pytest.mark.parametrize(("name", "keys"), CASES, ids=str)
def test_resolved_jobs_come_back_equal(name: str, keys: dict[str, Any]) -> None:
    found = job(name, **keys)
    back = Job.from_toml(found.to_toml())
    assert back == found
    assert back.to_toml() == found.to_toml()


RATIOS = "must be a list of numbers greater than 0 and at most 1"
EXCHANGED: dict[str, dict[str, Any]] = {
    "easgd": {"name": "easgd"},
    "local-sgd": {"name": "local-sgd", "steps": 4},
    "gossip": {"name": "gossip", "mode": "pull"},
}

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("none", {"ratio": 0.1}, "compression.ratio = 0.1: unknown key; must be one of name"),
    (
        "qsgd",
        {"level": 3},
        "compression.level = 3: unknown key; must be one of name, gbytes_per_s, error_feedback, levels, bucket; "
        "did you mean levels?",
    ),
    (
        "sign",
        {"ratio": 0.1},
        "compression.ratio = 0.1: unknown key; must be one of name, gbytes_per_s, error_feedback",
    ),
    (
        "dgc",
        {"error_feedback": True},
        "compression.error_feedback = true: unknown key; must be one of name, gbytes_per_s, ratio, momentum, nesterov, "
        "clip, warmup, warmup_ratios",
    ),
    ("top-k", {"ratio": 0}, "compression.ratio = 0: must be greater than 0"),
    ("random-k", {"ratio": 1.5}, "compression.ratio = 1.5: must be at most 1"),
    ("dgc", {"ratio": math.nan}, "compression.ratio = NaN: must be at most 1"),
    ("top-k", {"error_feedback": 1}, "compression.error_feedback = 1: must be true or false"),
    ("top-k", {"gbytes_per_s": 0}, "compression.gbytes_per_s = 0: must be at least 1e-09"),
    ("dgc", {"momentum": 1}, "compression.momentum = 1: must be less than 1"),
    ("dgc", {"clip": 0}, "compression.clip = 0: must be greater than 0"),
    ("dgc", {"warmup": -1}, "compression.warmup = -1: must be at least 0"),
    *(
        ("dgc", {"warmup": 9, "warmup_ratios": ratios}, f"compression.warmup_ratios = {shown}: {RATIOS}")
        for ratios, shown in (([], "[]"), (0.5, "0.5"), ([0.5, 0], "[0.5, 0]"), ([True], "[true]"), ([2], "[2]"))
    ),
    (
        "dgc",
        {"warmup_ratios": [0.25]},
        "compression.warmup_ratios = [0.25]: must have at most as many entries as the warm-up has pushes, "
        "compression.warmup = 0",
    ),
    ("qsgd", {"levels": 0}, "compression.levels = 0: must be at least 1"),
    ("qsgd", {"levels": 32768}, "compression.levels = 32768: must be at most 32767"),
    ("qsgd", {"bucket": 0}, "compression.bucket = 0: must be at least 1"),
    ("powersgd", {"rank": 0}, "compression.rank = 0: must be at least 1"),
    *(
        (
            codec,
            {"paradigm": EXCHANGED[name]},
            f'compression.name = "{codec}": must be "none" with paradigm.name = "{name}", '
            "which transfers weights; these cannot be compressed",
        )
        for name, codec in zip(EXCHANGED, ("top-k", "fp16", "dgc"), strict=True)
    ),
    (
        "top-k",
        {"paradigm": "ashl", "ratio": 0.5},
        'compression.ratio = 0.5: must be omitted with paradigm.name = "ashl", '
        "whose ratio_coarse and ratio_fine set it",
    ),
    (
        "dgc",
        {"paradigm": "ashl"},
        'compression.name = "dgc": must be another with paradigm.name = "ashl", '
        "which transfers no gradients; the momentum of dgc is for these",
    ),
    (
        "dgc",
        {"paradigm": "adsp"},
        'compression.name = "dgc": must be another with paradigm.name = "adsp", '
        "which transfers no gradients; the momentum of dgc is for these",
    ),
    (
        "dgc",
        {"optimizer": {"momentum": 0.9}},
        'optimizer.momentum = 0.9: must be 0 or omitted with compression.name = "dgc", '
        "which has its own momentum, compression.momentum",
    ),
]


@pytest.mark.parametrize(("name", "keys", "message"), MISTAKES, ids=str)
def test_mistakes_are_reported_in_one_line(name: str, keys: dict[str, Any], message: str) -> None:
    assert error(name, **keys) == message
