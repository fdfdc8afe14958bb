"""From bytes to KV blocks: memory formula, sizes at start-up, plans for other values."""
