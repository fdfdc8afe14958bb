"""The host cache benchmark on a tiny model: each turn finds its conversation in the expected place."""

from pathlib import Path

from engine_benchmarks.host_cache_bench import measure


def test_conversations_are_found_in_all_three_places(tiny_model: Path) -> None:
    places = measure(
        str(tiny_model), 96, 2, load_format="dummy", cpu_threads=1, kv_offload_size="4Mi", max_num_batched_tokens=64
    )
    assert {place: found["turns"] for place, found in places.items()} == {
        "computed": 6,
        "KV cache": 2,
        "host memory": 4,
    }
    assert places["host memory"]["one"]["num_cached_tokens"] == 96
    assert places["host memory"]["one"]["num_host_cached_tokens"] >= 48  # its prefix may still be on the device
    assert places["KV cache"]["one"]["num_cached_tokens"] == 96
    assert all(found["median_processor_ms"] > 0 for found in places.values())
