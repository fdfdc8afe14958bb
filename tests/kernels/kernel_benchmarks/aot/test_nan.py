"""NaN stays NaN in conversions to float8. The interpreter's clamp always keeps NaN, the device's only with the right
instruction, so the compiled code is checked.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trimtab_kernels

COMPILE = """
import torch
from kernel_benchmarks.aot.specialisation import specialise
from trimtab_kernels.launch.jit import record_launches, triton
from trimtab_kernels.{module} import {launcher}

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

cache = lambda: empty(4, 16, 2, 64, dtype=torch.float8_e4m3fn)
with record_launches() as launches:
    {launcher}({arguments})
(launch,) = launches
special = specialise(launch)
source = triton.compiler.ASTSource(
    launch.kernel.function, special.signature, special.constants, special.attributes
)
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
print(triton.compile(source, target=target, options=dict(launch.options)).asm["ptx"])
"""
SLOTS = "empty(8, dtype=torch.int64)"


@pytest.mark.parametrize(
    ("module", "launcher", "arguments"),
    [
        ("w8a8_block_fp8", "quantize_groups_triton", "empty(8, 512)"),
        (
            "reshape_and_cache",
            "reshape_and_cache_triton",
            f"empty(8, 2, 64), empty(8, 2, 64), cache(), cache(), {SLOTS}",
        ),
        (
            "rope_and_cache",
            "rope_and_cache_triton",
            f"empty(8, 512), empty(8, 32, dtype=torch.complex64), cache(), cache(), {SLOTS}",
        ),
    ],
)
def test_clamp_before_float8_keeps_nan(module: str, launcher: str, arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(trimtab_kernels.__file__).parents[1])
    program = COMPILE.format(module=module, launcher=launcher, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    clamps = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] and "xorsign" in line.split()[0]]
    clamps += [line.split()[0] for line in done.stdout.splitlines() if line.strip().startswith(("min.", "max."))]
    assert any(name.startswith("min.NaN") for name in clamps), clamps
    assert not any(name.startswith("min.") and ".f32" in name and "NaN" not in name for name in clamps), clamps
