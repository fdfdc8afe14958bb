"""The command-line flags of `trimtab-engine serve`, one file per family, and how they become an `EngineConfig`."""
