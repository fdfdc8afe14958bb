"""Benchmarks for users, with vLLM's arguments and fields: latency, throughput and serving."""
