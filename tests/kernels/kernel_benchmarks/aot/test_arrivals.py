"""The last CTA reads the results that all others have stored. The interpreter runs CTAs one by one, so the order of
barriers, counter, stores and loads is checked in the compiled code.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trimtab_kernels

COMPILE = """
from kernel_benchmarks.aot.__main__ import find_jobs
from trimtab_kernels.launch.jit import triton

(job,) = find_jobs(only="{case}", targets=[90])
special = job.specialisation
source = triton.compiler.ASTSource(
    job.launch.kernel.function, special.signature, special.constants, special.attributes
)
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
print(triton.compile(source, target=target, options=dict(job.launch.options)).asm["ptx"])
"""
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?(bar\.sync|barrier|atom|st\.global|ld\.global)(\S*)", re.MULTILINE)


@pytest.mark.parametrize(
    "case",
    [
        "paged_decode 32/4x128",
        "argmax bfloat16",
        "sample bfloat16",
        "skinny_gemm 6144x4096",
        "w8a8_block_fp8 4096x4096, 1 tokens",
    ],
)
def test_split_is_stored_before_count_and_read_after(case: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(trimtab_kernels.__file__).parents[1])
    program = COMPILE.format(case=case)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = INSTRUCTION.findall(done.stdout)
    kinds = [kind for kind, _ in found]
    (at,) = (i for i, (kind, how) in enumerate(found) if kind == "atom" and "acq_rel" in how)
    assert {"gpu", "add"} <= set(found[at][1].strip(".").split(".")), found[at]
    before, after = kinds[:at], kinds[at + 1 :]
    stored = len(before) - 1 - before[::-1].index("st.global")
    assert "bar.sync" in before[stored:], "all threads have stored before one of them counts"
    read = after.index("ld.global")
    assert "bar.sync" in after[:read], "and read after it has the count"
    assert not any(kind == "ld.global" and ".nc" in suffix for kind, suffix in found[at:]), "a stale cache is not read"
