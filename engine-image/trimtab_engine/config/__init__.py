"""Engine configuration: from flags to one validated `EngineConfig`. No tensors, no sockets."""
