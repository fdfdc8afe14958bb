"""Files of a model folder: their names, JSON, and GGUF metadata. No torch."""
