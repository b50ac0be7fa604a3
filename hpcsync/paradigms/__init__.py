"""Synchronisation paradigms: one module each, with its options and traits, and as a pure state machine.

A paradigm with servers decides when a push becomes an update and when each worker may continue. `create` builds one by
name; `hpcsync.paradigms.events` defines its events and actions. `OPTIONS` holds the declaration of every paradigm
(`hpcsync.paradigms.options`), in the order of lists; the modules of this folder are searched for them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.options import ParadigmOptions
from hpcsync.planning.checks import must_be_one_of

OPTIONS: dict[str, type[ParadigmOptions]] = {}
PARADIGMS: dict[str, Callable[..., Paradigm]] = {}  # the state machines of those with servers


def discover() -> None:
    """Fill `OPTIONS` and `PARADIGMS` from the modules of this package.

    Raises
    ------
    ValueError
        If two modules declare the same name.
    """
    found: dict[str, type[ParadigmOptions]] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, ParadigmOptions) and "name" in vars(kind):
                name = vars(kind)["name"]
                if found.setdefault(name, kind) is not kind:
                    raise ValueError(f"both {found[name]} and {kind} declare the paradigm {name}")
    OPTIONS.clear()
    OPTIONS.update(sorted(found.items(), key=lambda item: (item[1].place, item[0])))
    PARADIGMS.clear()
    PARADIGMS.update({name: kind.policy for name, kind in OPTIONS.items() if kind.policy is not None})


discover()


def create(name: str, n_workers: int, **options: Any) -> Paradigm:
    """Create the state machine of a paradigm with servers.

    Parameters
    ----------
    name
        A key of `PARADIGMS`.
    n_workers
        Number of workers, at least 1.
    **options
        Keyword arguments of the paradigm's class.

    Returns
    -------
    Paradigm
        A new instance in its initial state.

    Raises
    ------
    ValueError
        If the name is unknown or an option has a value that is not allowed.
    TypeError
        If the paradigm does not have an option, or a required option is missing.
    """
    must_be_one_of("name", name, PARADIGMS)
    return PARADIGMS[name](n_workers, **options)
