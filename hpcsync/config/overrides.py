"""Changes of the table of a job before it is validated: overrides, number of workers, keys that others exclude."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hpcsync.config.base import Table
from hpcsync.config.batches import Batches
from hpcsync.config.cluster import Cluster, Compute
from hpcsync.config.compression import TAKE_RATIO, CompressionOptions
from hpcsync.config.errors import JobError, shown
from hpcsync.config.optimizer import Schedule
from hpcsync.config.paradigms import ParadigmTable, kind_of
from hpcsync.config.workloads import WORKLOADS, WorkloadOptions
from hpcsync.paradigms import OPTIONS

MOST_LEVELS = 16  # of tables and lists within each other


def _kinds(union: Any, key: str) -> dict[str, type[Table]]:
    """Return the tables of a union by their kind, which is the tag of a table or the value of this key."""
    members = [(get_args(member) or (member, None)) for member in get_args(get_args(union)[0])]
    return {tag.tag if tag else get_args(kind.model_fields[key].annotation)[0]: kind for kind, tag in members}


KINDS = {  # allowed values of the key that names the kind of a table
    "workload": [*WORKLOADS, '"package.module:function"'],
    "paradigm": list(OPTIONS),
    "then": ["asp", "ssp", "dssp"],
    "schedule": list(_kinds(Schedule, "name")),
    "compute": list(_kinds(Compute, "model")),
    "compression": list(_kinds(CompressionOptions, "name")),
}


def default_servers(paradigm: Any) -> int:
    """Return the default number of servers for a [paradigm], which need not be valid."""
    kind = kind_of(paradigm)
    return int(kind is None or kind.policy is not None)


class Override(NamedTuple):
    """An override `--set KEY=VALUE`: its text, the parts of the key, and the value."""

    text: str
    key: tuple[str, ...]
    value: Any

    @staticmethod
    def of(text: str) -> Override:
        """Parse the text. VALUE is TOML, or a string if it is not valid TOML, so that words need no quotes.

        A table that has a kind can be set by its name: paradigm=bsp is paradigm.name=bsp.
        """
        key, equals, value = text.partition("=")
        parts = tuple(part.strip() for part in key.split("."))
        if not equals or not all(parts):
            raise JobError(f"--set {text}: must be KEY=VALUE, such as paradigm.staleness_max=20")
        if len(parts) > MOST_LEVELS:
            raise JobError(f"--set {shown(text)}: must be nested at most {MOST_LEVELS} levels deep")
        try:
            parsed = tomllib.loads(f"value = {value}")
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed = {}
        except ValueError:
            raise JobError(f"--set {shown(text)}: must have whole numbers of at most 64 bits") from None
        found = parsed["value"] if parsed.keys() == {"value"} else value.strip()
        if parts in _OF_KINDS and isinstance(found, str):
            parts = (*parts, _OF_KINDS[parts][0])
        return Override(text, parts, found)


# Tables that are one of several kinds: the key that names the kind, and the union of the kinds.
_OF_KINDS = {
    ("workload",): ("name", WorkloadOptions),
    ("paradigm",): ("name", ParadigmTable),
    ("compression",): ("name", CompressionOptions),
    ("optimizer", "schedule"): ("name", Schedule),
    ("cluster", "compute"): ("model", Compute),
}


def override(table: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply ``KEY=VALUE`` overrides to the table of a job, in place.

    If an override changes the kind of a table, such as paradigm.name, the keys that the new kind does not have are
    dropped, except those set by an override; and so are those that an override excludes (`excluded`).

    Parameters
    ----------
    table : dict
        Table of a job.
    overrides : sequence of str
        Overrides.

    Returns
    -------
    list of str
        A line for each table from which keys were dropped.

    Raises
    ------
    JobError
        For an override that is not KEY=VALUE, or whose key is below a value that is not a table.
    """
    parsed = [Override.of(text) for text in overrides]
    kinds = {path: at(table, (*path, key)) for path, (key, _) in _OF_KINDS.items()}
    for each in parsed:
        _set(table, each)
    given = {each.key for each in parsed}
    lines = []
    for path, (key, union) in _OF_KINDS.items():
        above = [path[: n + 1] for n in range(len(path))]
        if (*path, key) in given and given.isdisjoint(above):
            lines += _without_foreign_keys(at(table, path), path, key, kinds[path], union, given)
    return lines + drop_excluded(table, given)


def _without_foreign_keys(
    table: dict[str, Any], path: tuple[str, ...], key: str, before: Any, union: Any, given: set[tuple[str, ...]]
) -> list[str]:
    """Drop the keys of another kind from a table whose kind was `before`; return a line about them, if any."""
    now = table[key]
    if not isinstance(now, str) or before in (None, now):
        return []
    tag = get_args(union)[1].discriminator  # a key, or a function of the table
    kind = _kinds(union, key).get(tag(table) if callable(tag) else now)
    if kind is None:
        return []
    others = [name for name in table if name != key and (*path, name) not in given]
    fields = kind.model_fields
    kept = [name for name in others if name in fields and _accepts(fields[name], table[name])]
    dropped = [name for name in others if name not in kept]
    for name in dropped:
        del table[name]
    if not dropped:
        return []
    line = f"{'.'.join((*path, key))} changed from {before} to {now}: {', '.join(dropped)} dropped"
    return [line + (f"; {', '.join(kept)} kept" if kept else "")]


class Excluded(NamedTuple):
    """Key that another one excludes or leaves without effect, and why."""

    key: tuple[str, ...]
    cause: tuple[str, ...]
    why: str


def excluded(table: Mapping[str, Any]) -> Iterator[Excluded]:
    """Yield the keys that values of a table exclude, or leave without effect; the table need not be valid."""
    kind, compression = kind_of(table.get("paradigm")), at(table, ("compression", "name")) or "none"
    if at(table, ("batches", "policy")) == "equal":
        for name in Batches.model_fields:
            if name != "policy":
                yield Excluded(("batches", name), ("batches", "policy"), "where all have the same batch size")
    if kind is None:
        return
    cause, has_servers = ("paradigm", "name"), kind.policy is not None
    servers, scale = at(table, ("cluster", "servers")), at(table, ("optimizer", "async_lr_scale"))
    if type(servers) is int and (servers > 0) != has_servers:
        yield Excluded(("cluster", "servers"), cause, "")
    if scale != 1.0 and not (has_servers and kind.contribution == "gradient"):
        yield Excluded(("optimizer", "async_lr_scale"), cause, "where no update is one of several")
    for key in () if has_servers else (("placement",), ("colocated",), ("network", "server_bandwidth_gbit")):
        yield Excluded(("cluster", *key), cause, "which has no servers")
    for name in kind.ratios if compression not in TAKE_RATIO else ():
        yield Excluded(("paradigm", name), ("compression", "name"), "which takes no ratio from a paradigm")
    for name, (others, why) in kind.excludes.items():
        if at(table, ("paradigm", name)) is not None:
            yield from (Excluded(("paradigm", other), ("paradigm", name), why) for other in others)


def drop_excluded(table: dict[str, Any], given: Collection[tuple[str, ...]]) -> list[str]:
    """Drop from a table what overrides of these keys exclude, except what they set; return a line for each cause."""
    dropped: dict[tuple[str, ...], list[str]] = {}
    for key, cause, _ in [*excluded(table)]:
        is_given = any(key[:n] in given for n in range(1, len(key) + 1))
        if cause[0] in {each[0] for each in given} and not is_given and pop(table, key) is not None:
            dropped.setdefault(cause, []).append(".".join(key))
    return [f"{'.'.join(cause)} is {at(table, cause)}: {', '.join(keys)} dropped" for cause, keys in dropped.items()]


def pop(table: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Remove this key and return its value; None if there is none."""
    parent = at(table, path[:-1])
    return parent.pop(path[-1], None) if isinstance(parent, dict) else None


def _accepts(field: FieldInfo, value: Any) -> bool:
    """Return whether a value is valid for this field. Several kinds have a `mode`, each with values of its own."""
    kind: Any = Annotated[field.annotation, *(field.metadata or [None])]
    try:
        TypeAdapter(kind).validate_python(value)
    except (ValidationError, JobError):
        return False
    return True


def at(table: Any, path: tuple[str, ...]) -> Any:
    """Return the value at this key; None if there is none."""
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return table


def _set(table: dict[str, Any], override: Override) -> None:
    *parents, last = override.key
    for depth, parent in enumerate(parents, 1):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise JobError(f"--set {override.text}: {'.'.join(parents[:depth])} must be a table, it is {shown(table)}")
    table[last] = override.value


def set_workers(table: dict[str, Any], ranks: int) -> None:
    """Set cluster.workers to the ranks that are not servers, unless there is a cluster.workers_min."""
    cluster = table.setdefault("cluster", {})
    if isinstance(cluster, dict) and "workers_min" in cluster:
        return
    servers = cluster.get("servers", default_servers(table.get("paradigm"))) if isinstance(cluster, dict) else None
    if type(servers) is int:  # anything else is refused when the job is validated
        if ranks <= servers:
            raise JobError(f"-n {ranks}: must be at least {servers + 1}: cluster.servers = {servers} and a worker")
        if cluster.get("workers", Cluster.model_fields["workers"].default) != ranks - servers:
            table.pop("predicted", None)  # that of another number of workers
        cluster["workers"] = ranks - servers
