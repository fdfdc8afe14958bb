"""The engine's rows without a GPU: the same code on the CPU with a tiny model. Not a measurement."""

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kernel_benchmarks.end_to_end import (
    TooLittleMemory,
    covered_fraction,
    decode,
    main,
    measure_rows,
    prefill,
    seconds_since_start,
    start_and_measure,
    workload_rate,
)
from kernel_benchmarks.engine_rows import GROUPS, EngineRow, Group, Kind
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.load import Compiled, add, checked, drop_all, running_engine
from kernel_benchmarks.phase import DONE, OUT_OF_TIME, Clock, Phase
from kernel_benchmarks.report import FILE, Entry, Report
from trimtab_engine.messages.requests import StepOutputs, StepStats

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine

TINY = ModelShape("tiny", 2, 64, 96, 4, 2, 16, 10_001, False, False)


def a_phase(folder: Path, seconds: float = 60.0) -> Phase:
    report, now = Report(folder / FILE, "1"), time.time()
    return Phase("", report, Clock(now, now + seconds, now + seconds), argparse.Namespace())


def test_row_without_time_after_start_is_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = partial(running_engine, device="cpu", device_memory_bytes=4 << 30, num_gpu_blocks_override=200)
    monkeypatch.setattr("kernel_benchmarks.end_to_end.running_engine", lambda shape, **memory: started(shape))
    phase = a_phase(tmp_path, -1.0)
    phase.rest.gpu_memory_utilization = "0.9"
    group = Group(TINY, False)
    row = EngineRow(TINY, Kind.PREFILL, 0.5)
    assert start_and_measure(group, [row], phase) == [row.name]
    assert not Report(phase.report.path, "1").fail_running("it ended"), "nothing is under way"


def test_single_engine_measures_every_rate(tmp_path: Path) -> None:
    with running_engine(
        TINY, device="cpu", max_num_seqs=8, device_memory_bytes=4 << 30, num_gpu_blocks_override=200
    ) as engine:
        assert decode(engine, 3, context=40, steps=4) > 0
        assert prefill(engine, [([5] * 20, 1)] * 4) > 0
        assert workload_rate(engine, [([5, 6, 7], 4), ([8], 2)]) > 0
        good, bad = EngineRow(TINY, Kind.PREFILL, 0.5), EngineRow(TINY, Kind.BUSY, 0.5)

        def measured(engine: "Engine", row: EngineRow, limits: dict[str, float]) -> Entry:
            add(engine, [([5] * 20, 1)])
            if row is bad:
                raise ZeroDivisionError(row.name)
            return {"limit": "model", "bar": 0.5, "rate": prefill(engine, []), "share": 0.7}

        phase = a_phase(tmp_path)
        assert measure_rows(engine, [bad, good], phase, measured) == []
        assert not engine.has_work, "what a failed row left is dropped"
        assert measure_rows(engine, [bad, good], a_phase(tmp_path, -1.0), measured) == [bad.name, good.name]
    assert phase.report.rows[good.name]["share"] == 0.7
    assert "ZeroDivisionError" in phase.report.rows[bad.name]["error"]


@pytest.mark.parametrize(("blocks", "happened"), [(10, "some were preempted"), (5, "they ended one after the other")])
def test_batch_larger_than_kv_cache_is_an_error(blocks: int, happened: str) -> None:
    """Each of three requests needs more than four blocks in the end: there is room for two, or for one."""
    changes = {"device_memory_bytes": 4 << 30, "num_gpu_blocks_override": blocks, "max_model_len": 80}
    with running_engine(TINY, device="cpu", max_num_seqs=8, **changes) as engine:
        with pytest.raises(TooLittleMemory, match=f"3 requests cannot .*{happened}.* --gpu-memory-utilization"):
            decode(engine, 3, context=40, steps=4)
        drop_all(engine)


def test_measured_rows_need_no_engine(tmp_path: Path) -> None:
    phase = a_phase(tmp_path)
    for row in GROUPS[1].rows:
        phase.report.add(row.name, {"share": 0.5})
    assert GROUPS[1].select_rows("", phase.report.has) == []
    assert GROUPS[0].select_rows("prefill", phase.report.has) == [GROUPS[0].rows[3]]
    arguments = ["--output", str(tmp_path), "--run", "1", "--group"]
    assert main([*arguments, "1"]) == DONE
    assert main([*arguments, "0", "--until", "0"]) == OUT_OF_TIME


def test_seconds_since_start_is_process_age() -> None:
    assert 0 < seconds_since_start() < 7 * 24 * 3600


def test_step_with_compilation_is_an_error() -> None:
    stats = StepStats(1, 0.0, 0.0, "decode", 1, 0, 0, 0, 0)
    checked(StepOutputs([], stats))
    stats.kernel_compilations = 1
    with pytest.raises(Compiled):
        checked(StepOutputs([], stats))


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([(0.0, 100.0)], 1.0),
        ([(0.0, 100.0), (300.0, 400.0)], 0.5),
        ([(0.0, 200.0), (100.0, 200.0), (200.0, 400.0)], 1.0),
        ([(0.0, 195.0), (100.0, 105.0), (205.0, 400.0)], 1.0),
    ],
    ids=["one", "a gap", "overlapping", "the device's gap between two"],
)
def test_covered_fraction_counts_overlaps_once_and_short_gaps(
    intervals: list[tuple[float, float]], share: float
) -> None:
    assert covered_fraction(intervals) == share


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


def test_engine_starts_with_packages_from_wheels(tmp_path: Path) -> None:
    """The engine's other packages may be missing."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {REFUSED!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import trimtab_engine.core.startup, trimtab_engine.core.engine, kernel_benchmarks.end_to_end\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
