"""Operators compiled from C for the CPU: a decoder layer's whole work in one call (docs/decisions/cpu-native-operators.md)."""
