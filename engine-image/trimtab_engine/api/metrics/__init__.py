"""Prometheus metrics (vLLM's `vllm:` families and Trimtab's own), and the statistics log line."""
