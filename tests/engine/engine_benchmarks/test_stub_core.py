"""The stub core responds like a core, so that only API servers are measured."""

import asyncio
import sys
from pathlib import Path

import engine_benchmarks
import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client import started_core
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.messages.requests import AddRequest, StepStats
from trimtab_engine.scheduling.sampling import Sampling

DEADLINE_SECONDS = 120.0


async def test_every_request_gets_one_token_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-m", "engine_benchmarks.stub_core")
    monkeypatch.setattr(started_core, "CORE_COMMAND", command)
    monkeypatch.setenv("PYTHONPATH", str(Path(engine_benchmarks.__file__).parents[1]))  # it is not installed
    steps: list[StepStats] = []
    launcher = CoreLauncher(EngineConfig(model="m"))
    client = CoreClient(launcher.addresses[0], on_step=steps.append)
    client.open()
    await launcher.start(client)

    async def outputs(name: str, max_tokens: int) -> list[int]:
        request = AddRequest(name, [1, 2], Sampling(max_tokens=max_tokens), 0.0)
        return [len(output.token_ids) async for output in client.generate(request)]

    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await client.loaded.wait()
            assert list(await asyncio.gather(outputs("a", 1), outputs("b", 3))) == [[1], [1, 1, 1]]
        assert sum(stats.num_generation_tokens for stats in steps) == 4
    finally:
        await launcher.close(client)
