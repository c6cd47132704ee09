"""One thread: the tensors are tiny, and the ranks are threads already."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
