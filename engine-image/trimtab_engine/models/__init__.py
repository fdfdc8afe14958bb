"""Models: one file per family, the registry of families, and shared code."""
