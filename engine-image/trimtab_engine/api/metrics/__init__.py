"""Prometheus metrics: the `vllm:` families and Trimtab's own, and the statistics line of the log."""
