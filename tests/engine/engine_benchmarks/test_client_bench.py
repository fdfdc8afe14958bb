"""The load generator's cost is measured on a load that it reads completely."""

from engine_benchmarks import client_bench


def test_every_chunk_of_every_request_is_read() -> None:
    outcome = client_bench.measure(num_chunks=11)
    assert len(outcome.complete) == client_bench.REQUESTS
    assert {result.output_len for result in outcome.complete} == {11}
    assert outcome.client_cpu_seconds > 0
