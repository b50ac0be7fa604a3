"""Declared state: what is built from plain values, and what is refused; the classes are tested in test_restored.py."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hpcsync.paradigms.records import StepInfo
from hpcsync.state import StateError, Stateful, built, plain, restore_arrays


class Kind(IntEnum):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: float
    kind: Kind = Kind.ONE


@dataclass
class Pair:
    one: Point
    other: set[int]


class Inner(Stateful):
    state_types = {"_n": int}

    def __init__(self) -> None:
        self._n = 0
        self.undeclared = 0


class Outer(Stateful):
    state_types = {"inner": Inner, "later": Inner | None, "names": list[str], "latest": deque[float]}

    def __init__(self) -> None:
        self.inner = Inner()
        self.alias = self.inner
        self.later: Inner | None = None
        self.names: list[str] = []
        self.same_names = self.names
        self.latest: deque[float] = deque(maxlen=2)


VALUES = [
    (int, -3),
    (int, 2**100),
    (float, 0.1),
    (float, 3),  # stays an integer
    (float, -0.0),
    (float, math.inf),
    (bool, True),
    (str, "inf"),
    (int | None, None),
    (list[float], [1.0, -math.inf]),
    (set[int], {3, 1}),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str], (1, "a")),
    (deque[int], deque([1, 2], 5)),
    (deque[int], deque([1, 2])),
    (dict[int, set[int]], {-3: {1}, 0: set()}),
    (dict[str, list[tuple[float, int]]], {"a": [(1.0, 2)], "": []}),
    (dict[int, deque[float]], {1: deque([0.5], 1)}),
    (Kind, Kind.TWO),
    (Point, Point(1.0, Kind.TWO)),
    (list[Point], [Point(2.0)]),
    (Pair, Pair(Point(1.0), {1})),
    (tuple[int | float, ...], (1, 2.5)),
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_a_value_survives_json(kind, value):
    again = built(kind, json.loads(json.dumps(plain(value))))
    assert again == value and type(again) is type(value)
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)
    assert repr(again) == repr(value), "such as -0.0, and the order of a dictionary"


def test_floats_that_json_does_not_have_may_be_strings():
    assert built(list[float], ["inf", "-inf"]) == [math.inf, -math.inf]
    assert math.isnan(built(float, "nan"))


@pytest.mark.parametrize(
    ("kind", "value", "line"),
    [
        (int, 1.0, "must be int, got 1.0"),
        (int, True, "must be int, got True"),
        (int, "1", "must be int, got '1'"),
        (float, "1", "must be float, got '1'"),
        (bool, 1, "must be bool, got 1"),
        (str, None, "must be str, got None"),
        (float, None, "must be float, got None"),
        (int | None, "x", "must be int, got 'x'"),
        (list[int], {"0": 1}, r"must be list\[int\], got dict"),
        (list[int], [1, "x"], r"\[1\]: must be int, got 'x'"),
        (set[int], 3, r"must be set\[int\], got 3"),
        (tuple[int, int], [1], r"must be tuple\[int, int\], got list"),
        (dict[int, int], {"x": 1}, "must be int, got 'x'"),
        (dict[str, int], {"x": []}, "x: must be int, got list"),
        (deque[int], [1], r"must be collections.deque\[int\], got list"),
        (deque[int], {"latest": [1]}, "at_most: must be given"),
        (Kind, 3, "must be Kind, got 3"),
        (Point, {"x": 1.0}, "kind: must be given"),
        (Point, {"x": 1.0, "kind": 1, "z": 1}, "z: must be left out"),
        (Point, [1.0, 1], "must be Point, got list"),
        (Pair, {"one": {"x": "x", "kind": 1}, "other": []}, "one.x: must be float, got 'x'"),
        (torch.Tensor, [1.0], "must be Tensor, got list"),
        (np.ndarray, 1.0, "must be ndarray, got 1.0"),
        (torch.Tensor | float | None, "x", "must be .*Tensor.*, got 'x'"),
        (tuple[int | float, ...], ["x"], r"\[0\]: must be int | float, got 'x'"),
    ],
)
def test_other_values_are_refused_in_one_line(kind, value, line):
    with pytest.raises(StateError, match=f"^{line}$"):
        built(kind, value)


def test_what_cannot_be_saved_is_refused():
    with pytest.raises(TypeError, match="^function cannot be part of a state$"):
        plain({"a": [lambda: 0]})


def test_references_to_restored_objects_stay_valid():
    one, other = Outer(), Outer()
    one.inner._n, one.inner.undeclared, one.later = 5, 6, Inner()
    one.later._n = 7
    one.names += ["a"]
    one.latest += [1.0, 2.0]
    other.restore(json.loads(json.dumps(one.state())))
    assert other.alias is other.inner and (other.inner._n, other.inner.undeclared) == (5, 0)
    assert other.later is not None and other.later._n == 7
    assert other.same_names is other.names == ["a"]
    assert other.latest == deque([1.0, 2.0]) and other.latest.maxlen == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"names": 3}, r"names: must be list\[str\], got 3"),
        ({"inner": {"n": "x"}}, "inner.n: must be int, got 'x'"),
        ({"inner": {"n": 1, "undeclared": 1}}, "inner.undeclared: must be left out"),
        ({"inner": []}, "inner: must be an object, got list"),
        ({"later": {}}, "later.n: must be given"),
        ({"more": 1}, "more: must be left out"),
        ({"names": ["a", 1]}, r"names.\[1\]: must be str, got 1"),
    ],
)
def test_a_state_of_another_form_is_refused(change, line):
    with pytest.raises(StateError, match=f"^{line}$"):
        Outer().restore(Outer().state() | change)
    with pytest.raises(StateError, match="^inner: must be given$"):
        Outer().restore({})


@pytest.mark.parametrize(
    "saved", [torch.ones(2, dtype=torch.float64), torch.ones(1), torch.ones(2, 1), torch.tensor(1.0)]
)
def test_arrays_of_another_shape_or_type_are_refused(saved):
    """A tensor of one element would otherwise fill the whole vector."""
    live = torch.zeros(2)
    with pytest.raises(StateError, match=r"^v: must be torch.float32 of shape \(2,\), got "):
        restore_arrays({"v": live}, {"v": saved})
    assert live.tolist() == [0, 0]
    restore_arrays({"v": live}, {"v": torch.ones(2)})
    assert live.tolist() == [1, 1]


def test_declarations_of_base_classes_come_first():
    class Derived(Inner):
        state_types: Any = {"more": str}

    assert [*Derived.all_state_types()] == ["_n", "more"]


def test_a_field_that_came_later_may_be_missing():
    """As in checkpoints that were made before it existed; all others must be given."""
    old = plain(StepInfo(1, 2))
    del old["gradient_sq"], old["mean_gradient_sq"]
    assert built(StepInfo, old)[:-2] == StepInfo(1, 2)[:-2]
    del old["worker"]
    with pytest.raises(StateError, match=r"worker: must be given"):
        built(StepInfo, old)
