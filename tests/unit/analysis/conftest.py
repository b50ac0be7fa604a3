"""The scripts import each other from their own folder, as they do when they are run."""

import sys
from pathlib import Path

from tests.unit.figures.conftest import _figures_have_few_pixels  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[3] / "analysis"))
