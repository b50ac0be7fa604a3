"""Configuration of Sphinx. `make docs` builds the pages without a network, and they need none to be read."""

import sys
from importlib import resources
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from hpcsync import __version__  # noqa: E402  (it loads nothing else)

project = "hpcsync"
author = "the hpcsync developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "reference", "tables"]
exclude_patterns = ["_build", "_ext", "_generated"]

myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Without a network there is no inventory of what other projects document.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|numpy|np|mpi4py|MPI|h5py|cupy|pandas|pydantic|typer|rich|pathlib|Path|collections|contextlib|Job|Evaluate)\b.*",
    ),
    (
        r"py:class",
        r"optional|iterator|callable|mapping|path|sequence|Action|Event",
    ),  # words of NumPy-style types; unions without a class
]

html_theme = "pydata_sphinx_theme"
html_title = f"hpcsync {release}"
html_math_renderer = "mathml"
# The font of formulas: STIX Two Math, which the package ziamath brings.
html_static_path = ["_static", str(resources.files("ziamath") / "fonts/STIXTwoMath-Regular.ttf")]
html_css_files = ["hpcsync.css"]
html_copy_source = False
html_sidebars = {"benchmarks": [], "choosing": []}
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_depth": 2,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
}
