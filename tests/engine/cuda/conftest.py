"""Between two tests the device is seen to be there, and what the first one left on it goes."""

import gc
from collections.abc import Iterator

import pytest
import torch

# References on the CPU by many processes at once: with a thread for each core they took most of the time.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_an_empty_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    request.getfixturevalue("report_device_errors")
    yield
    gc.collect()
    torch.cuda.empty_cache()
