"""Decoder layers compiled from C for the CPU; ADR-0010 has the reasons."""
