"""`trimtab-engine autotune`: find the values of three live parameters with the highest throughput under latency limits.

limits and space (inputs) → search (which trial next, pure) with bounds (trials that cannot win) → trials and engine
(running them: the load of `bench serve`, live changes) with state (results, for resuming) → report, page and patch
(outputs); run connects them. Never imports torch.
"""
