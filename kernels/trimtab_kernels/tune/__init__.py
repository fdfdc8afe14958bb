"""Launch configurations of a model's shapes, measured on the GPUs present: `python -m trimtab_kernels.tune`."""
