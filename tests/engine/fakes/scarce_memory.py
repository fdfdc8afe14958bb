"""Run a module as an engine process whose device has no memory for more KV blocks while a file named after the process
number exists: `scarce_memory.py FOLDER MODULE`.
"""

import os
import runpy
import sys
from pathlib import Path

from trimtab_engine.device.kv_cache import KVCache

FOLDER, MODULE = Path(sys.argv[1]), sys.argv[2]
really_keep = KVCache._keep


def keep(cache: KVCache, num_blocks: int) -> None:
    if num_blocks > cache.num_blocks and (FOLDER / str(os.getpid())).exists():
        raise MemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
    really_keep(cache, num_blocks)


if __name__ == "__main__":
    KVCache._keep = keep  # type: ignore[assignment, method-assign]  # what the driver would say
    sys.argv = sys.argv[:1]
    runpy.run_module(MODULE, run_name="__main__")
