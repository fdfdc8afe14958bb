"""Dependent kernels access no memory before their wait, checked in the compiled code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trimtab_kernels

COMPILE = """
from kernel_benchmarks.aot.__main__ import find_jobs
from trimtab_kernels.launch.gluon import source_of
from trimtab_kernels.launch.jit import triton

(job,) = find_jobs(only="{case}", targets=[90])
special = job.specialisation
source = source_of(job.launch.kernel, special.signature, special.constants, special.attributes)
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
compiled = triton.compile(source, target=target, options=dict(job.launch.options))
print(compiled.metadata.launch_pdl)
print(compiled.asm["ptx"])
"""
INSTRUCTION = re.compile(
    r"^\s*(?:@!?%p\d+ )?(griddepcontrol\.\w+|prefetch\.global|cp\.async\S*|atom|st\.global|ld\.global)", re.MULTILINE
)


def instructions(case: str) -> tuple[str, list[str]]:
    """Return (whether it is launched dependently, accesses to memory or other kernels in the order of the code)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(trimtab_kernels.__file__).parents[1])
    program = COMPILE.format(case=case)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    is_ahead, code = done.stdout.split("\n", 1)
    return is_ahead, INSTRUCTION.findall(code)


@pytest.mark.parametrize(
    "case",
    [
        "skinny_gemm dependent, 6144x4096",
        "skinny_gemm dependent, 14336x4096",
        "rope_and_cache dependent",
        "paged_decode dependent",
    ],
)
def test_dependent_kernel_only_prefetches_weights_before_wait(case: str) -> None:
    is_ahead, found = instructions(case)
    assert is_ahead == "True"
    assert found.count("griddepcontrol.wait") == 1
    at = found.index("griddepcontrol.wait")
    assert found[0] == "griddepcontrol.launch_dependents"
    assert set(found[1:at]) <= {"prefetch.global"}
    assert ("prefetch.global" in found) == case.startswith("skinny_gemm")
    assert {"ld.global", "cp.async.cg.shared.global"} & set(found[at:])


def test_ordinary_launch_contains_no_dependence_instructions() -> None:
    is_ahead, found = instructions("skinny_gemm 6144x4096")
    assert is_ahead == "False"
    assert not {"griddepcontrol.wait", "griddepcontrol.launch_dependents", "prefetch.global"} & set(found)
