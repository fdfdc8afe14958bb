"""A decoder layer's whole work compiled from C for the CPU: ADR-0010 says why."""
