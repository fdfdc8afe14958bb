"""`make bench-gpu`: every kernel checked and measured on the GPU at hand, beside what else runs there.

One file per kernel gives its rows (see row.py); `timing` measures, `limits` finds what the device can do in the same
run, `report` keeps what was found. Imports torch, triton, numpy and trimtab_kernels, nothing else.
"""
