"""Several ranks that serve one model: who is who (ranks, shards, experts), how they talk, the workers' processes."""
