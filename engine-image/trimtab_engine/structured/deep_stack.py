"""A thread with a large stack, for native code that recurses with the nesting of a grammar."""

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 64 << 20
"""32 times the stack of a grammar's validation (validation.py), where an overflow only ends a worker process. Only the
used part is resident."""


def deep_stack_executor(name: str, stack_bytes: int = STACK_BYTES) -> ThreadPoolExecutor:
    """Return an executor with one thread, started here, because the stack size must be set before the thread starts."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(stack_bytes)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
