"""Published claims, each a table of jobs to simulate and what is to be seen in their results."""

import matplotlib

from hpcsync.figures import plotting

matplotlib.rcParams.update(plotting.STYLE)
