"""Trimtab's kernels: each file contains a reference, a Triton kernel if there is one, and a wrapper."""
