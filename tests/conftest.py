"""Triton reads this when it is imported, so it is set before any test module is: kernels then run in its interpreter,
on CPU tensors. Compilation has its own processes (tests/kernels/test_aot.py)."""

import os

os.environ["TRITON_INTERPRET"] = "1"
