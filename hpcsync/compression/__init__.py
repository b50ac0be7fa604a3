"""Fewer bytes for a push: codecs of flat vectors, with error feedback, on NumPy's or CuPy's arrays.

`create` makes one by its name; `codec` says what it can do.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike

from hpcsync.compression.codec import Codec, Encoded, TensorLayout
from hpcsync.compression.dgc import DGC
from hpcsync.compression.error_feedback import ErrorFeedback
from hpcsync.compression.half_precision import Bf16, Fp16
from hpcsync.compression.one_bit import OneBit, Sign
from hpcsync.compression.powersgd import PowerSGD
from hpcsync.compression.qsgd import QSGD
from hpcsync.compression.sparse import RandomK, TopK

__all__ = ["CODECS", "Codec", "Encoded", "ErrorFeedback", "TensorLayout", "create"]

CODECS: dict[str, type[Codec]] = {
    "top-k": TopK,
    "random-k": RandomK,
    "dgc": DGC,
    "qsgd": QSGD,
    "one-bit": OneBit,
    "sign": Sign,
    "powersgd": PowerSGD,
    "fp16": Fp16,
    "bf16": Bf16,
}


def create(
    name: str,
    layout: TensorLayout,
    dtype: DTypeLike,
    *,
    seed: int = 0,
    error_feedback: bool | None = None,
    **options: Any,
) -> Codec:
    """Make the codec of this name for vectors of this layout.

    error_feedback: None: where the codec `feeds_back`.
    options: top-k and random-k `ratio`; dgc `ratio`, `momentum`, `nesterov`, `clip`, `warmup`, `warmup_ratios`; qsgd
    `levels`, `bucket`; powersgd `rank`; one-bit, sign, fp16 and bf16 have none.

    Raises ValueError for an unknown name or a value that is not allowed, TypeError for an option that the codec does
    not have.
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}, only {', '.join(CODECS)}")
    kind = CODECS[name]
    fed_back = kind.feeds_back if error_feedback is None else error_feedback
    if kind is RandomK:
        options["rescaled"] = not fed_back
    codec = kind(layout, dtype, seed=seed, **options)
    return ErrorFeedback(codec) if fed_back else codec
