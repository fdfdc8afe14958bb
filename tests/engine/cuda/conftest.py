"""Between two tests the device is seen to be there, and what the first one left on it goes."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def on_an_empty_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    request.getfixturevalue("device_outlives_the_test")
    yield
    gc.collect()
    torch.cuda.empty_cache()
