"""Benchmarks with vLLM's arguments and result fields: latency, throughput and serving."""
