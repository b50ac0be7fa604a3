"""The scripts import each other from their own folder, as they do when they are run."""

import sys
from pathlib import Path

import pytest

from hpcsync.figures import plotting

sys.path.insert(0, str(Path(__file__).parents[3] / "analysis"))


@pytest.fixture(autouse=True, scope="module")
def _figures_have_few_pixels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plotting.STYLE, "savefig.dpi", 50)
        yield
