"""Text to learn from that every machine has, the source of Python's standard library, and a transformer that predicts
its characters one by one."""

from __future__ import annotations

import sys
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpcsync.config.errors import JobError
from hpcsync.training.flat_model import device_of

# What a character may be: these, and one symbol for all others.
SYMBOLS = "\t\n" + "".join(map(chr, range(32, 127)))
OTHERS = len(SYMBOLS)
N_SYMBOLS = len(SYMBOLS) + 1

PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "json")
EVALUATED = 16_384  # characters of held-out text

_CODE_OF = np.full(128, OTHERS, dtype=np.uint8)  # 127 stands for whatever is not ASCII
_CODE_OF[[ord(symbol) for symbol in SYMBOLS]] = range(OTHERS)


# ---- the text ----


def encode(text: str) -> torch.Tensor:
    """One number below N_SYMBOLS per character, uint8, shape (len(text),)."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_CODE_OF[np.minimum(points, 127)])


def source_files(root: Path) -> list[str]:
    """Files of the standard library in this folder, relative and sorted: its modules and some packages, without tests
    and without what an installation or its distributor adds."""
    modules = [path for path in root.glob("*.py") if path.stem in sys.stdlib_module_names]
    packages = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return sorted(path.relative_to(root).as_posix() for path in (*modules, *packages))


def is_held_out(name: str) -> bool:
    """About every tenth file, by its name alone: a file that another version of Python adds moves no other."""
    return zlib.crc32(name.encode()) % 10 == 0


def characters(root: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """All training files one after the other, and all held-out ones, encoded; about 5.2 and 0.7 million characters.

    root: the folder of the standard library; None is the running Python's, whose version therefore decides the text.
    Raises JobError where it has no source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[bool, list[str]] = {False: [], True: []}
    for name in source_files(root):
        texts[is_held_out(name)].append((root / name).read_text(encoding="utf-8", errors="replace"))
    if not all(texts.values()):
        raise JobError(f'workload.name = "text": must find the source of Python\'s standard library in {root}')
    return encode("".join(texts[False])), encode("".join(texts[True]))


def windows(text: torch.Tensor, context: int) -> TensorDataset:
    """Encoded text cut into sequences (x, y) of `context` characters each, uint8, where y is x one character later.

    Sequences do not overlap, and they are views: the text is in memory once.
    """
    return TensorDataset(text[:-1].unfold(0, context, context), text[1:].unfold(0, context, context))


# ---- the model ----


class Block(nn.Module):
    """Causal self-attention and a layer of four times the width, each added to what comes in. (B, T, width) in and
    out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self._attention(self.before_attention(x)))
        return x + self.feed_forward(x)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, 2)
        )
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Logits of the next character after every character of a sequence: (B, T) integers to (B, T, N_SYMBOLS), T at
    most `context`. Decoder only, normalised before each part, no dropout."""

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(N_SYMBOLS, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, N_SYMBOLS)
        nn.init.normal_(self.logits.weight, std=0.02)  # at first it expects every symbol alike
        nn.init.zeros_(self.logits.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.symbols(x.long()) + self.positions[: x.shape[1]]
        return self.logits(self.norm(self.blocks(embedded)))


# ---- how it is judged ----


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a character, in nats."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten().long())


def evaluation(text: torch.Tensor, context: int) -> Callable[[nn.Module], tuple[float, float]]:
    """Mean cross-entropy of a character in nats, and the share of characters predicted, each from at most `context`
    before it in its sequence: of EVALUATED characters (or one sequence, if that is longer), in sequences spread evenly
    over this text."""
    data = windows(text, context)
    n = min(len(data), max(1, EVALUATED // context))
    x, y = data[torch.arange(n) * len(data) // n]
    y = y.flatten().long()

    def evaluate(model: nn.Module) -> tuple[float, float]:
        model.eval()
        targets = y.to(device_of(model))
        with torch.no_grad():
            logits = model(x.to(targets.device)).flatten(0, 1)
        return float(functional.cross_entropy(logits, targets)), float((logits.argmax(1) == targets).double().mean())

    return evaluate
