"""The source of Python's standard library as a text, and a transformer that predicts its next character."""

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

# The alphabet: these characters, and one symbol for all others.
SYMBOLS = "\t\n" + "".join(map(chr, range(32, 127)))
OTHERS = len(SYMBOLS)
N_SYMBOLS = len(SYMBOLS) + 1

PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "json")
EVALUATED = 16_384  # characters of held-out text in an evaluation

_CODE_OF = np.full(128, OTHERS, dtype=np.uint8)  # 127 stands for all characters beyond ASCII
_CODE_OF[[ord(symbol) for symbol in SYMBOLS]] = range(OTHERS)


# ---- the text ----


def encode(text: str) -> torch.Tensor:
    """Return the code of each character, below `N_SYMBOLS`, uint8, shape (len(text),)."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return torch.from_numpy(_CODE_OF[np.minimum(points, 127)])


def source_files(root: Path) -> list[str]:
    """Return the files of the standard library in a folder, as sorted relative paths.

    They are its modules and some packages, without tests and without additions of an installation or its distributor.
    """
    modules = [path for path in root.glob("*.py") if path.stem in sys.stdlib_module_names]
    packages = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return sorted(path.relative_to(root).as_posix() for path in (*modules, *packages))


def is_held_out(name: str) -> bool:
    """Return True for about every tenth file, by its name alone, so that added files do not move others."""
    return zlib.crc32(name.encode()) % 10 == 0


def characters(root: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoded training text and held-out text, about 5.2 and 0.7 million characters.

    Parameters
    ----------
    root
        Folder of the standard library; None: that of the running Python, whose version determines the text.

    Raises
    ------
    JobError
        If the folder holds no source.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts: dict[bool, list[str]] = {False: [], True: []}
    for name in source_files(root):
        texts[is_held_out(name)].append((root / name).read_text(encoding="utf-8", errors="replace"))
    if not all(texts.values()):
        raise JobError(f'workload.name = "text": must find the source of Python\'s standard library in {root}')
    return encode("".join(texts[False])), encode("".join(texts[True]))


def windows(text: torch.Tensor, context: int) -> TensorDataset:
    """Return encoded text as sequences (x, y) of `context` characters each, uint8, where y is x one character later.

    Sequences do not overlap. They are views, so the text is in memory once.
    """
    return TensorDataset(text[:-1].unfold(0, context, context), text[1:].unfold(0, context, context))


# ---- the model ----


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer of four times the width, each residual; (B, T, width) to same."""

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
        """Return the block's output, shape (B, T, width)."""
        x = x + self.attended(self._attention(self.before_attention(x)))
        return x + self.feed_forward(x)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self._heads, -1)).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, 2)
        )
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    """Decoder-only transformer for the next character, with pre-normalisation and without dropout.

    Parameters
    ----------
    context
        Longest sequence.
    layers, width, heads
        Number of blocks, width of the embedding, and attention heads of a block.
    """

    def __init__(self, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(N_SYMBOLS, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, N_SYMBOLS)
        nn.init.normal_(self.logits.weight, std=0.02)  # initially all symbols are about equally likely
        nn.init.zeros_(self.logits.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, T, N_SYMBOLS), for codes x, shape (B, T), T at most `context`."""
        embedded = self.symbols(x.long()) + self.positions[: x.shape[1]]
        return self.logits(self.norm(self.blocks(embedded)))


# ---- evaluation ----


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of a character in nats."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten().long())


def evaluation(text: torch.Tensor, context: int) -> Callable[[nn.Module], tuple[float, float]]:
    """Return an evaluation of mean cross-entropy (nats per character) and the share of correct predictions.

    It covers `EVALUATED` characters (or one sequence, if that is longer), in sequences spread evenly over the text.
    Each character is predicted from at most `context` characters before it in its sequence.
    """
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
