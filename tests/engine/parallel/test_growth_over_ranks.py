"""KV cache growth and wake-up on every rank and core or none, without effect on running requests."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.core.engine import Engine
from trimtab_engine.engine_client import started_core
from trimtab_engine.executor import workers
from trimtab_engine.messages.admin import Call, GetConfig, GetLayout, GetMemory, PatchConfig, Sleep, WakeUp

pytestmark = pytest.mark.usefixtures("forked")
SCARCE = Path(__file__).parents[1] / "fakes" / "scarce_memory.py"
ROOM = {
    "num_gpu_blocks_override": None,
    "device_memory_bytes": 2 << 30,
    "gpu_memory_utilization": "0.5",
    "gpu_memory_utilization_cap": "0.6",
    "block_size": 64,
}
MORE = PatchConfig({"gpu_memory_utilization": 0.55, "max_num_seqs": 5})
EVERYTHING = ["weights", "kv_cache", "scheduling"]


def mapped(ledgers: list[dict[str, Any]]) -> list[int]:
    """Bytes of the KV cache on each rank, or of each core."""
    return [int(ledger["kinds"]["kv_mapped"]) for ledger in ledgers]


@pytest.fixture
def scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """Says whether the device of the process with this number has memory for more blocks."""
    command = (sys.executable, str(SCARCE), str(tmp_path))
    monkeypatch.setattr(workers, "WORKER_COMMAND", (*command, "trimtab_engine.executor.worker"))
    monkeypatch.setattr(started_core, "CORE_COMMAND", (*command, "trimtab_engine.core.process"))

    def switch(pid: int, is_scarce: bool) -> None:
        file = tmp_path / str(pid)
        file.touch() if is_scarce else file.unlink()

    return switch


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_rank_map_failure_rejects_patch_for_all(
    layout: dict[str, int],
    models: dict[str, str],
    start: Callable[..., Engine],
    serving: Any,
    scarce: Callable[[int, bool], None],
) -> None:
    serve, requests, _ = serving
    engine = start(models["dense"], **layout, **ROOM)
    expected = serve(engine, requests())
    other = next(row for row in engine.layout()["ranks"] if row["pid"] != os.getpid())
    before, total = engine.config(), mapped(engine.memory()["ranks"])
    scarce(other["pid"], True)
    asked = requests()
    answers: dict[str, list[Any]] = {request.request_id: [] for request in asked}
    for request in asked:
        engine.add(request)
    num_steps = 0
    while engine.has_work:
        if num_steps in (2, 6):
            status, body = engine.patch_config(MORE)
            assert status == 422
            assert body["field"] == "gpu_memory_utilization"
            assert f"rank {other['rank']}: cuMemCreate failed" in body["message"]
            assert engine.config() == before
        for output in engine.step().outputs:
            assert output.finish_reason in (None, "length")
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
        num_steps += 1
    assert num_steps > 6
    assert answers == expected
    assert mapped(engine.memory()["ranks"]) == total
    scarce(other["pid"], False)
    assert engine.patch_config(MORE)[0] == 200
    grown = mapped(engine.memory()["ranks"])
    assert all(now > then for now, then in zip(grown, total, strict=True))
    assert engine.config()["generation"] == 2
    assert serve(engine, requests()) == expected


def test_a_rank_that_cannot_map_lets_the_engine_sleep_on_and_wake_up_later(
    models: dict[str, str], start: Callable[..., Engine], serving: Any, scarce: Callable[[int, bool], None]
) -> None:
    serve, requests, _ = serving
    engine = start(models["dense"], tensor_parallel_size=2, **ROOM)
    expected = serve(engine, requests())
    other = engine.layout()["ranks"][1]["pid"]
    assert engine.lifecycle(Sleep(2, "abort"))[0] == 200
    scarce(other, True)
    status, body = engine.lifecycle(WakeUp(EVERYTHING))
    assert status == 409
    assert "rank 1: cuMemCreate failed" in body["message"]
    assert mapped(engine.memory()["ranks"]) == [0, 0]
    scarce(other, False)
    assert engine.lifecycle(WakeUp(EVERYTHING))[0] == 200
    assert serve(engine, requests()) == expected


def test_core_map_failure_rejects_patch_for_all(
    models: dict[str, str],
    config_of: Callable[..., Any],
    cores_of: Callable[..., Any],
    serving: Any,
    scarce: Callable[[int, bool], None],
) -> None:
    _, requests, _ = serving

    async def life() -> None:
        async with cores_of(config_of(models["dense"], data_parallel_size=2, **ROOM)) as cores:

            async def body_of(call: Call, status: int = 200) -> dict[str, Any]:
                reply = await cores.call(call)
                assert reply.status == status, reply.body
                return dict(reply.body)

            expected = await cores.serve(requests())
            before = await body_of(GetConfig())
            pids = [row["pid"] for row in (await body_of(GetLayout()))["ranks"]]
            total = mapped((await body_of(GetMemory()))["data_parallel"])
            scarce(pids[1], True)
            running = asyncio.create_task(cores.serve(requests()))
            for _ in range(3):
                refused = await body_of(MORE, 422)
                assert "data-parallel rank 1: not enough device memory" in refused["message"]
                assert await body_of(GetConfig()) == before, "one generation, of all cores"
            assert await running == expected
            assert mapped((await body_of(GetMemory()))["data_parallel"]) == total
            await body_of(Sleep(1, "abort"))
            message = (await body_of(WakeUp(EVERYTHING), 409))["message"]
            assert "data-parallel rank 1: " in message
            assert mapped((await body_of(GetMemory()))["data_parallel"]) == [0, 0], "no single core is awake"
            scarce(pids[1], False)
            await body_of(WakeUp(EVERYTHING))
            running = asyncio.create_task(cores.serve(requests()))
            assert (await body_of(MORE))["generation"] == 2
            assert await running == expected
            grown = mapped((await body_of(GetMemory()))["data_parallel"])
            assert all(now > then for now, then in zip(grown, total, strict=True))

    asyncio.run(life())
