"""Kernel benchmark (`make bench-gpu`): checks and measures every kernel on this machine's GPU, and compares it with
alternatives.

One file per kernel provides its rows (see row.py); `timing` measures, `limits` determines the device's limits in the
same run, `report` stores the results. Imports only torch, triton, numpy and trimtab_kernels.
"""
