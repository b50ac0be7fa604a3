"""Packages that cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsync.system import optional_packages
from hpcsync.system.optional_packages import ERRORS, unusable


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package_at_all", "needs no_such_package_at_all, which is not installed: pip install it"),
        (
            "from json import no_such_name",
            "a package that it needs cannot be imported: cannot import name 'no_such_name' from 'json'",
        ),
        (
            "import json; json.loads('[')",
            "a package that it needs cannot be imported: Expecting value: line 1 column 2",
        ),
        ("from hpcsync import no_such_name", None),
    ],
)
def test_what_is_wrong_with_a_package(code: str, said: str | None) -> None:
    with pytest.raises(ERRORS) as raised:
        exec(code)
    found = unusable(raised.value, ["no_such_package_at_all"], "pip install it")
    assert (found and found.partition(" (")[0]) == said
    if isinstance(raised.value, ModuleNotFoundError):
        assert unusable(raised.value, [], "pip install it") is None, "not one that may be missing"


def test_a_mistake_in_a_module_of_the_package_itself_is_no_package_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("x")
    assert unusable(raised.value, [], "") is not None
    monkeypatch.setattr(optional_packages, "PACKAGE", Path(__file__).parent)
    assert unusable(raised.value, [], "") is None
