"""A live resize under load, on the CPU with a tiny model and few bytes. Not a measurement."""

import pytest
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.load import add, running_engine
from kernel_benchmarks.resize import ResizeFailed, live_resize
from trimtab_engine.memory.reserved import RANK_BYTES

TINY = ModelShape("tiny", 2, 64, 96, 4, 2, 16, 10_001, False, False)
DEVICE_BYTES, RESIZED_BYTES = 4 << 30, 8 << 20


def utilization(mib_above_the_reserve: int) -> str:
    return f"{(RANK_BYTES + (mib_above_the_reserve << 20)) / DEVICE_BYTES:.4f}"


@pytest.mark.parametrize(("cap_mib", "refused"), [(400, ""), (260, "refused")])
def test_resize_stalls_requests_and_keeps_their_tokens(cap_mib: int, refused: str) -> None:
    memory = {"gpu_memory_utilization": utilization(258), "gpu_memory_utilization_cap": utilization(cap_mib)}
    with running_engine(
        TINY, device="cpu", max_num_seqs=8, device_memory_bytes=DEVICE_BYTES, cpu_threads=1, **memory
    ) as engine:
        if refused:
            with pytest.raises(ResizeFailed, match=refused):
                live_resize(engine, num_bytes=RESIZED_BYTES, requests=4, context=30)
            return
        found = live_resize(engine, num_bytes=RESIZED_BYTES, requests=4, context=30)
        assert found.bytes_moved >= 0.99 * RESIZED_BYTES
        assert max(found.stalls) < 60
        add(engine, [([5] * 20, 2)])
        engine.check_integrity()
