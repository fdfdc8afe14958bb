"""What the engine is asked to be, from flags to one checked `EngineConfig`; it knows no tensor and no socket."""
