"""Every test here runs as the device thread does, in inference mode, and on one thread: these models are
small, and idle threads that spin slow whatever else the machine does."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
