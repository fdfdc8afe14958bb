"""Models without a family of their own: transformers' code computes them, with Trimtab's paged attention."""
