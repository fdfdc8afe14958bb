"""The engine's rows without a GPU: the same code on the CPU with a tiny model. Nothing here is a measurement."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks import end_to_end
from benchmarks.end_to_end import Compiled, an_engine, checked, covered, decode, measure_rows, prefill, workload_rate
from benchmarks.ideal import ModelShape
from benchmarks.report import Report, identity
from trimtab_engine.messages import StepOutputs, StepStats

TINY = ModelShape("tiny", 2, 64, 96, 4, 2, 16, 10_001, False, False)


def a_report(folder: Path) -> Report:
    return Report(folder / "gpu.json", identity(torch.device("cpu"), "3.0"), "make bench-gpu", resume=True)


def test_every_figure_comes_out_of_one_engine(tmp_path: Path) -> None:
    with an_engine(
        TINY, device="cpu", max_num_seqs=8, device_memory_bytes=4 << 30, num_gpu_blocks_override=200
    ) as engine:
        rate, context = decode(engine, 3, context=40, steps=4)
        assert rate > 0
        assert context == 40 + end_to_end.WARM_UP_STEPS + 2
        assert prefill(engine, prompts=4, length=20) > 0
        assert workload_rate(engine, [([5, 6, 7], 4), ([8], 2)]) > 0
        report = a_report(tmp_path)
        rows: list[end_to_end.Row] = [("engine a", 0.5, lambda engine: (prefill(engine, prompts=2, length=8), 1e9))]
        rows.append(("engine b", 0.5, lambda engine: 1 / 0))  # type: ignore[arg-type, return-value]  # a row that fails
        assert measure_rows(engine, rows, report, time.monotonic() + 60) == []
        assert measure_rows(engine, rows, report, time.monotonic() - 1) == ["engine a", "engine b"]
    assert report.rows["engine a"]["share"] < 1
    assert "ZeroDivisionError" in report.rows["engine b"]["error"]


def test_a_step_that_compiled_is_no_measurement() -> None:
    stats = StepStats(1, 0.0, 0.0, "decode", 1, 0, 0, 0, 0)
    checked(StepOutputs([], stats))
    stats.kernel_compilations = 1
    with pytest.raises(Compiled):
        checked(StepOutputs([], stats))


@pytest.mark.parametrize(
    ("intervals", "share"),
    [([(0.0, 1.0)], 1.0), ([(0.0, 1.0), (3.0, 4.0)], 0.5), ([(0.0, 2.0), (1.0, 2.0), (2.0, 4.0)], 1.0)],
)
def test_overlapping_kernels_are_counted_once(intervals: list[tuple[float, float]], share: float) -> None:
    assert covered(intervals) == share


REFUSED = (
    "gguf",
    "fastapi",
    "uvicorn",
    "uvloop",
    "aiohttp",
    "httpx",
    "pydantic",
    "yaml",
    "prometheus_client",
    "typer",
    "rich",
)


def test_the_engine_starts_with_what_the_wheels_bring(tmp_path: Path) -> None:
    """The rest of the engine's packages may be missing."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {REFUSED!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import trimtab_engine.startup, trimtab_engine.engine, benchmarks.end_to_end\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
