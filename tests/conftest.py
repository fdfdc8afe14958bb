"""Triton reads this when it is imported, so it is set before any test module is: kernels then run in its interpreter,
on CPU tensors. Compilation has its own processes (tests/kernels/aot). `make test-gpu` sets 0: kernels then run on the
GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
