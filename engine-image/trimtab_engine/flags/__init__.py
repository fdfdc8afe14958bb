"""Command-line flags of `trimtab-engine serve`, one module per family, and their conversion to an `EngineConfig`."""
