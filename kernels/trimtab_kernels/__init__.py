"""Trimtab's kernels: each file holds a reference, a Triton kernel where there is one, and a wrapper."""
