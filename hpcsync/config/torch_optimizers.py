"""Optimizers of torch.optim that a job may name, and their options, as torch's source says without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from pathlib import Path

from hpcsync.config.errors import JobError, did_you_mean, shown
from hpcsync.config.optimizer import Optimizer

CLASSES = {  # element-wise ones, see training/optimizers.py
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sgd": "SGD",
}

# Options that select an implementation and do not change the method: servers choose their own.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")

OF_SCRIPTS = ("clip_norm", "groups")  # keys that a job file may not have


def check(settings: Optimizer) -> None:
    """Raise JobError if torch.optim does not have the optimizer or one of its options; values are not checked."""
    check_name(settings)
    if settings.options and (known := options(settings.name)) is not None:
        check_options(settings, known)


def check_name(settings: Optimizer) -> None:
    """Raise JobError for a name that is not in `CLASSES`."""
    if settings.name not in CLASSES:
        hint = did_you_mean(settings.name, CLASSES)
        raise JobError(f"optimizer.name = {shown(settings.name)}: must be one of {', '.join(CLASSES)}{hint}")


def check_options(settings: Optimizer, known: Collection[str]) -> None:
    """Raise JobError for an option that is not one of these."""
    keys = [key for key in Optimizer.model_fields if key not in ("name", *OF_SCRIPTS)]
    for key, value in settings.options.items():
        if key not in known:
            must = f"an option of torch.optim.{CLASSES[settings.name]} ({', '.join(known)}) or one of {', '.join(keys)}"
            hint = did_you_mean(key, [*known, *keys])
            raise JobError(f"optimizer.{key} = {shown(value)}: must be {must}{hint}")


def options(name: str) -> list[str] | None:
    """Return the options of an optimizer besides `lr`; None if torch's source does not show them.

    Importing torch takes seconds, reading one of its files milliseconds.
    """
    try:
        torch = importlib.util.find_spec("torch")
        folder = Path((torch.submodule_search_locations or [""])[0] if torch is not None else "")
        tree = ast.parse((folder / "optim" / f"{name}.py").read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == CLASSES[name]:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = [each.arg for each in (*method.args.args, *method.args.kwonlyargs)]
                    return [each for each in given if each not in ("self", "params", "lr", *IMPLEMENTATION)]
    return None
