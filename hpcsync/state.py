"""Declared state: which attributes of an object a checkpoint holds, and of which types.

A class lists them in `state_types`. Its state consists of plain values (numbers, strings, None, lists and dictionaries)
and of arrays, so that JSON and an array format can hold it; names are without leading underscores. Everything else
about an object follows from the job and is created anew: what is not declared is neither saved nor restored.

A declared type is one of::

    bool, int, float, str, None, an enumeration, X | Y
    list[X], set[X], deque[X], tuple[X, ...], tuple[X, Y], dict[str, X], dict[int, X], dict[int | str, X]
    a named tuple or a data class           of such types; fields in `later_fields` may be missing in an old checkpoint
    a class with declared state
    Any                                     plain values for another `restore`
    another class, such as torch.Tensor     array
    numpy.ndarray                           array, of CuPy too while it is being saved
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import types
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # floats that JSON does not have, as strings


class StateError(ValueError):
    """A saved state is not of the declared types."""


class Stateful:
    """Base of objects whose state is saved and restored.

    Attributes
    ----------
    state_types
        Type of each attribute that is part of the state, by name; those of base classes are added.
    """

    state_types: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def all_state_types(cls) -> dict[str, Any]:
        """Return the declared types, base classes first."""
        declared: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            declared |= vars(base).get("state_types", {})
        return declared

    def state(self) -> dict[str, Any]:
        """Return the state: plain values, and the arrays themselves, not copies."""
        return {name.lstrip("_"): plain(getattr(self, name)) for name in self.all_state_types()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that an object of this class has returned, in an object created from the same parameters.

        Collections, arrays and objects with declared state are changed in place, so that other references to them stay
        valid.

        Raises
        ------
        StateError
            If the state is not of the declared types.
        """
        declared = self.all_state_types()
        _must_have(state, [name.lstrip("_") for name in declared])
        for name, kind in declared.items():
            saved = name.lstrip("_")
            setattr(self, name, _at(saved, kind, state[saved], getattr(self, name, None)))


def plain(value: Any) -> Any:
    """Return a value as plain values and arrays; the inverse of `built`. Raises TypeError if it cannot be a state."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Stateful):
        return value.state()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, deque):
        return {"latest": [*map(plain, value)], "at_most": value.maxlen}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    if isinstance(value, numbers.Integral):  # of NumPy
        return int(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    raise TypeError(f"{type(value).__name__} cannot be part of a state")


def built(kind: Any, value: Any, live: Any = None) -> Any:
    """Return the value of a declared type that plain values stand for.

    Parameters
    ----------
    kind
        The type.
    value
        Plain values and arrays.
    live
        Present value, which is changed in place and returned if it is a collection, an array or has declared state.

    Raises
    ------
    StateError
        If the plain values are not of this type.
    """
    origin, parameters = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(kind, value, live)
    if kind is None or kind is types.NoneType:
        return _checked(value is None, kind, value)
    if isinstance(live, Stateful) or (isinstance(kind, type) and issubclass(kind, Stateful)):
        return _restored(kind, value, live)
    if origin is deque:
        _checked(isinstance(value, Mapping), kind, value)
        _must_have(value, ("latest", "at_most"))
        most = _at("at_most", int | None, value["at_most"])
        latest = _at("latest", types.GenericAlias(list, parameters), value["latest"])
        return _in_place(live, deque(latest, most))
    if origin in (list, set, tuple):
        return _in_place(live, _collection(kind, origin, parameters, value))
    if origin is dict:
        _checked(isinstance(value, Mapping), kind, value)
        pairs = ((built_key(parameters[0], key), _at(str(key), parameters[1], each)) for key, each in value.items())
        return _in_place(live, dict(pairs))
    if kind is float:
        number = NOT_FINITE.get(value, value) if isinstance(value, str) else value
        return _checked(isinstance(number, int | float) and not isinstance(number, bool), kind, value, number)
    if kind is int:
        return _checked(isinstance(value, int) and not isinstance(value, bool), kind, value)
    if issubclass(kind, enum.Enum):
        return kind(_checked(value in [member.value for member in kind], kind, value))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _type_hints(kind)
        _checked(isinstance(value, Mapping), kind, value)
        later = [name for name in getattr(kind, "later_fields", tuple)() if name not in value]
        _must_have(value, hints.keys() - set(later))
        return kind(**{name: _at(name, hint, value[name]) for name, hint in hints.items() if name not in later})
    if kind.__module__ == "numpy" and hasattr(value, "__array__"):
        import numpy  # not above: paradigms do without

        value = numpy.asarray(value)
    return _array_in_place(live, _checked(isinstance(value, kind), kind, value))


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def restore_arrays(live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Give live arrays the saved elements of the same names. Raises StateError if names, shapes or types differ."""
    _must_have(saved, live)
    for name, array in live.items():
        _at(name, type(array), saved[name], array)


def built_key(kind: type, key: Any) -> Any:
    """Return a dictionary's key, which JSON may have made a string."""
    if int in (kind, *get_args(kind)) and isinstance(key, str) and key.lstrip("-").isdecimal():
        return int(key)
    return built(kind, key)


def _checked(holds: bool, kind: Any, value: Any, returned: Any = None) -> Any:
    if not holds:
        shown = f"{value!r:.60}" if isinstance(value, bool | int | float | str | None) else type(value).__name__
        raise StateError(f"must be {_name(kind)}, got {shown}")
    return value if returned is None else returned


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _at(name: str, kind: Any, value: Any, live: Any = None) -> Any:
    """Build the value of this name; an error then begins with it."""
    try:
        return built(kind, value, live)
    except StateError as error:
        below = str(error)
        raise StateError(f"{name}{': ' if below.startswith('must be') else '.'}{below}") from None


def _must_have(state: Any, declared: Iterable[str]) -> None:
    """Raise StateError unless the state has exactly these names."""
    if not isinstance(state, Mapping):
        raise StateError(f"must be an object, got {type(state).__name__}")
    names = set(declared)
    if different := sorted(map(str, names ^ state.keys())):
        name = different[0]
        raise StateError(f"{name}: must be {'given' if name in names else 'left out'}")


def _one_of(kind: Any, value: Any, live: Any) -> Any:
    options = get_args(kind)
    if value is None:
        return _checked(types.NoneType in options, kind, value)
    concrete = [option for option in options if option is not types.NoneType]
    if len(concrete) == 1:
        return built(concrete[0], value, live)
    for option in concrete:
        try:
            return built(option, value, live)
        except StateError:
            continue
    return _checked(False, kind, value)


def _restored(kind: Any, value: Any, live: Any) -> Any:
    """Restore the live object, or a new one of this class."""
    if not isinstance(live, Stateful):
        live = kind.__new__(kind)
    live.restore(value)
    return live


def _collection(kind: Any, origin: Any, parameters: tuple[Any, ...], value: Any) -> Any:
    _checked(isinstance(value, list | tuple), kind, value)
    if origin is tuple and parameters[-1] is not Ellipsis:
        _checked(len(value) == len(parameters), kind, value)
        kinds: Iterable[Any] = parameters
    else:
        kinds = [parameters[0]] * len(value)
    return origin(_at(f"[{i}]", one, each) for i, (one, each) in enumerate(zip(kinds, value, strict=True)))


def _in_place(live: Any, value: Any) -> Any:
    """Give the live collection these contents, if it is of this type and can be changed."""
    if type(live) is not type(value) or isinstance(value, tuple):
        return value
    live.clear()
    (live.update if isinstance(value, set | dict) else live.extend)(value)
    return live


def _array_in_place(live: Any, value: Any) -> Any:
    """Give the live array these elements."""
    if live is None or not hasattr(live, "shape"):
        return value
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        expected, got = (f"{array.dtype} of shape {tuple(array.shape)}" for array in (live, value))
        raise StateError(f"must be {expected}, got {got}")
    live[...] = value
    return live
