"""Operators compiled from C for the CPU: a decoder layer's whole work in one call. README.md says how and why."""
