"""One thread, as on every rank: the bits of a sum must not depend on how many cores a machine has."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
