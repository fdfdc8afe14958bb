"""Models that have no family of their own: transformers' code computes them, over Trimtab's paged attention."""
