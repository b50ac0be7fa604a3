"""Published claims: the jobs to simulate for each of them, and the expected results."""

import matplotlib

from hpcsync.figures import plotting

matplotlib.rcParams.update(plotting.STYLE)
