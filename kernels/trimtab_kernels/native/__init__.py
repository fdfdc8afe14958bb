"""A decoder layer's whole work compiled from C for the CPU: docs/decisions/cpu-native-operators.md says why."""
