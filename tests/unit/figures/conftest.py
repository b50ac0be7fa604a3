"""No test looks at pixels."""

import pytest

from hpcsync.figures import plotting


@pytest.fixture(autouse=True, scope="module")
def _figures_have_few_pixels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plotting.STYLE, "savefig.dpi", 50)
        yield
