"""Compilation in a pool of processes, which omits failed and late items."""

import math
from collections.abc import Iterator

import pytest
from trimtab_kernels.tune.compile_ahead import CompileAhead, processes_per_gpu


@pytest.fixture
def ahead() -> Iterator[CompileAhead]:
    made = CompileAhead(None, 1)
    yield made
    made.close()


def test_compile_ahead_omits_failed_items(ahead: CompileAhead) -> None:
    assert ahead.run(math.sqrt, [3.0, -1.0, 5.0], 60.0) == [3.0, 5.0]


def test_compile_ahead_omits_late_items(ahead: CompileAhead) -> None:
    assert len(ahead.run(math.sqrt, [float(n) for n in range(2000)], 0.0)) < 2000


def test_cores_are_divided_among_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, gpus, processes in ((16, 1, 15), (16, 8, 1), (2, 1, 1), (1, 1, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert processes_per_gpu(gpus) == processes
