"""The scripts import each other from their own folder, as they do when they are run."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "analysis"
sys.path.insert(0, str(SCRIPTS))


@pytest.fixture(scope="session")
def scripts():
    return SCRIPTS
