"""Who comes last reads what all others have stored. The interpreter cannot show it, for there programs run one by one:
the order of barriers, counter, stores and loads is read in the code that the device gets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import trimtab_kernels

COMPILE = """
from trimtab_kernels.aot.__main__ import find_jobs
from trimtab_kernels.launch.jit import triton

(job,) = find_jobs(only="paged_decode 32/4x128", targets=[90])
special = job.specialisation
source = triton.compiler.ASTSource(
    job.launch.kernel.function, special.signature, special.constants, special.attributes
)
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
print(triton.compile(source, target=target, options=dict(job.launch.options)).asm["ptx"])
"""
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?(bar\.sync|barrier|atom|st\.global|ld\.global)(\S*)", re.MULTILINE)


def test_a_part_is_stored_before_it_is_counted_and_read_after() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(trimtab_kernels.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = INSTRUCTION.findall(done.stdout)
    kinds = [kind for kind, _ in found]
    assert kinds.count("atom") == 1
    at = kinds.index("atom")
    assert {"acq_rel", "gpu", "add"} <= set(found[at][1].strip(".").split(".")), found[at]
    before, after = kinds[:at], kinds[at + 1 :]
    stored = len(before) - 1 - before[::-1].index("st.global")
    assert "bar.sync" in before[stored:], "all threads have stored before one of them counts"
    read = after.index("ld.global")
    assert "bar.sync" in after[:read], "and read after it has heard the count"
    assert not any(kind == "ld.global" and ".nc" in suffix for kind, suffix in found[at:]), "a stale cache is not asked"
