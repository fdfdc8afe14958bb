"""An engine with a page-mapped KV cache as on CUDA, with a fake driver that poisons unmapped memory: using an unmapped
block would change tokens.
"""

import gc
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import pytest
from fake_cuda import PAGE, FakeCuda, FakeMemory
from trimtab_engine.core.engine import Engine
from trimtab_engine.device import device as device_module
from trimtab_engine.memory.reserved import RANK_BYTES
from trimtab_engine.messages.admin import PatchConfig, Sleep, WakeUp
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.scheduling.sampling import Sampling

DEVICE_BYTES = 4 << 30  # 0.0001 of it is 0.43 MB


@pytest.fixture
def model(model_of: Callable[..., Path]) -> Path:
    return model_of(num_hidden_layers=3, vocab_size=128)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The driver of every device that is made from now on."""
    driver = FakeCuda()
    monkeypatch.setattr(device_module, "HostMemory", lambda: FakeMemory(driver, 16 * PAGE))
    return driver


def utilization(steps_above_the_reserve: int) -> float:
    return (RANK_BYTES * 10_000 // DEVICE_BYTES + steps_above_the_reserve) / 10_000


an_engine = partial(
    engine_builders.an_engine,
    device_memory_bytes=DEVICE_BYTES,
    gpu_memory_utilization=str(utilization(60)),
    gpu_memory_utilization_cap=str(utilization(80)),
)


def requests() -> list[AddRequest]:
    dice = random.Random(1)
    greedy = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    return [
        AddRequest(f"r{n}", [dice.randrange(127) for _ in range(9 + 11 * n)], greedy, arrival_time=0.0)
        for n in range(10)
    ]


def run(engine: Engine, between_steps: Any = lambda: None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        between_steps()
    return tokens


def test_live_resizes_map_and_unmap_under_load_and_change_no_token(model: Path, fake: FakeCuda) -> None:
    expected = run(an_engine(model, num_gpu_blocks_override=400))
    engine = an_engine(model)
    field = engine.config()["fields"]["gpu_memory_utilization"]
    dice, sizes = random.Random(2), set()

    def resize() -> None:
        values = {"gpu_memory_utilization": dice.choice([field["min"], dice.uniform(field["min"], field["max"])])}
        assert engine.patch_config(PatchConfig(values))[0] == 200
        sizes.add(engine.ledger().blocks_total)
        engine.check_integrity()

    for _ in range(4):
        assert run(engine, resize) == expected
    assert len(sizes) > 4, "the KV cache really changed its size"
    assert {"cuMemMap", "cuMemUnmap"} <= set(fake.names())
    fake.check()


def test_an_engine_that_is_dropped_leaves_nothing_mapped(model: Path, fake: FakeCuda) -> None:
    engine: Engine | None = an_engine(model)
    assert engine is not None
    run(engine)
    assert fake.mapped_bytes > 0
    engine.close()
    engine = None
    gc.collect()
    assert (engine, fake.maps, fake.ranges) == (None, {}, {})


def test_patch_beyond_device_memory_is_rejected(model: Path, fake: FakeCuda) -> None:
    engine = an_engine(model)
    before, total = engine.config(), engine.ledger().blocks_total
    most = before["fields"]["gpu_memory_utilization"]["max"]
    fake.free_bytes = 5 * PAGE
    status, body = engine.patch_config(PatchConfig({"gpu_memory_utilization": most, "max_num_seqs": 3}))
    assert status == 422
    assert body["field"] == "gpu_memory_utilization"
    assert "cuMemCreate failed" in body["message"]
    assert engine.config() == before
    assert engine.ledger().blocks_total == total
    assert fake.free_bytes == 5 * PAGE
    assert len(run(engine)) == 10, "it serves on"
    engine.check_integrity()


def test_sleep_unmaps_kv_and_wake_up_keeps_addresses(model: Path, fake: FakeCuda) -> None:
    engine = an_engine(model, num_gpu_blocks_override=100)
    expected = run(engine)
    addresses, mapped = dict(fake.ranges), fake.mapped_bytes
    assert engine.lifecycle(Sleep(1, "abort"))[0] == 200
    assert fake.mapped_bytes < mapped - engine.ledger().bytes_per_block * 99
    assert engine.lifecycle(WakeUp(["weights", "kv_cache", "scheduling"]))[0] == 200
    assert (fake.ranges, fake.mapped_bytes) == (addresses, mapped)
    assert run(engine) == expected
    fake.check()


def test_an_engine_that_finds_no_memory_sleeps_on_and_can_be_woken_smaller(model: Path, fake: FakeCuda) -> None:
    engine = an_engine(model)
    expected = run(engine)
    assert engine.lifecycle(Sleep(1, "abort"))[0] == 200
    everything = WakeUp(["weights", "kv_cache", "scheduling"])
    fake.free_bytes -= (before := fake.free_bytes - 40 * 16 * PAGE)
    status, body = engine.lifecycle(everything)
    assert status == 409
    assert "lower gpu_memory_utilization" in body["message"]
    least = engine.config()["fields"]["gpu_memory_utilization"]["min"]
    assert engine.patch_config(PatchConfig({"gpu_memory_utilization": least}))[0] == 200
    assert engine.lifecycle(everything)[0] == 200
    engine.check_integrity()
    fake.free_bytes += before
    assert run(engine) == expected
    fake.check()


def test_envelope_reports_mapped_memory(model: Path, fake: FakeCuda) -> None:
    assert an_engine(model).config()["envelope"]["kv_memory"] == "mapped"
