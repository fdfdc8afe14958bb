"""One thread with a deep stack, for native code that recurses as deep as a grammar is nested."""

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 64 << 20
"""32 times what a grammar's trial runs in (trial.py), where an overflow ends a process that is there for it. Only
what is used is ever resident."""


def deep_stack_executor(name: str, stack_bytes: int = STACK_BYTES) -> ThreadPoolExecutor:
    """An executor of one thread, started here, as a stack's size is set before its thread starts."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(stack_bytes)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
