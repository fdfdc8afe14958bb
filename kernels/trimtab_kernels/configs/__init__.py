"""Measured launch configurations: one JSON file per matrix shape and GPU name, written by `trimtab_kernels.tune`."""
