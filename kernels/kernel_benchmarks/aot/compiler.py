"""Compiles a specialised kernel for a device that is not there, and reads what it would take of one.

Registers, stack and shared memory come from the machine code itself, by the `cuobjdump` that Triton's package carries;
for Hopper also what its hot loop does. A kernel that no device of its target could start is an error here, not at its
first launch, and so is one whose warp-group products the assembler made wait for one another.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab_kernels.launch.device_facts import H200, DeviceFacts
from trimtab_kernels.launch.gluon import GluonKernel, source_of
from trimtab_kernels.launch.jit import Launch, triton

from kernel_benchmarks.aot.async_mma import check_products
from kernel_benchmarks.aot.bounds import Bound, bound
from kernel_benchmarks.aot.machine_code import Loop, hot_loop, instructions_of
from kernel_benchmarks.aot.specialisation import Specialisation, specialise

REGISTERS_PER_SM = 65536
"""32-bit registers of a multiprocessor, of every generation here; a thread block's must fit."""
THREADS_PER_WARP = 32
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
EXPECTED = re.compile(r"mbarrier\.arrive\.expect_tx\S* _, \[\S+\], (\d+);")
"""In a kernel's PTX: so many bytes are expected of copies by the tensor memory accelerator."""

SHARING_ROWS = 128
"""A tile this tall is for many tokens: programs share its operands in the L2 cache. Lower ones are there for few, and
read each byte of weights or keys from memory once."""


class CannotLaunch(Exception):
    """The kernel compiles, but no device of the target has what it asks for."""


class Serialised(Exception):
    """The kernel compiles, but no two of its matrix products can be under way at once."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one target. `spill_bytes` per thread go to local memory; `source` is the hash of kernel code;
    `hot_loop` is counted for sm_90 alone. Where warps each do one thing (`consumer_groups`), num_warps are all of them,
    the hot loop is one consumer group's, and `bulk_bytes` is what the tensor memory accelerator copies per pass."""

    case: str
    kernel: str
    target: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: bool
    source: str
    key: str
    is_memory_bound: bool = True
    hot_loop: Loop | None = None
    consumer_groups: int = 0
    bulk_bytes: int = 0

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> "Compiled":
        """As a file has it. Raises TypeError for one of another version."""
        loop = entry.get("hot_loop")
        return cls(**{**entry, "hot_loop": Loop(**loop) if loop else None})

    @property
    def bound(self) -> Bound | None:
        """How fast the hot loop can go at best; None where none was counted."""
        if self.hot_loop is None:
            return None
        return bound(
            self.hot_loop,
            registers=self.registers,
            shared_bytes=self.shared_bytes,
            num_warps=self.num_warps,
            is_memory_bound=self.is_memory_bound,
            consumer_groups=self.consumer_groups,
            bulk_bytes=self.bulk_bytes,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What to compile. `key` tells jobs apart and is equal where the result must be."""

    case: str
    facts: DeviceFacts
    launch: Launch
    specialisation: Specialisation
    source: str
    key: str

    @classmethod
    def of(cls, case: str, facts: DeviceFacts, launch: Launch) -> "Job":
        special = specialise(launch)
        source = str(launch.kernel.function.cache_key)[:16]
        text = f"{triton.__version__} {source} {special.text} {sorted(launch.options.items())} {facts}"
        return cls(case, facts, launch, special, source, hashlib.sha256(text.encode()).hexdigest()[:24])


def compile_job(job: Job) -> Compiled:
    """Compile; seconds. Raises CannotLaunch, UnsafeProduct, Serialised, or whatever Triton raises for a kernel that it
    cannot compile."""
    special = job.specialisation
    source = source_of(job.launch.kernel, special.signature, special.constants, special.attributes)
    target = triton.backends.compiler.GPUTarget("cuda", job.facts.capability, THREADS_PER_WARP)
    compiled = triton.compile(source, target=target, options=dict(job.launch.options))
    registers, spill = _machine_code_usage(compiled.asm["cubin"])
    metadata = compiled.metadata
    kernel = job.launch.kernel.name.strip("_")
    machine_code = _dump(compiled.asm["cubin"], "-sass") if job.facts.capability == H200.capability else None
    consumer_groups = job.launch.kernel.consumer_groups if isinstance(job.launch.kernel, GluonKernel) else 0
    if machine_code:
        check_products(f"{job.case}: {kernel}", instructions_of(machine_code))
    result = Compiled(
        case=job.case,
        kernel=kernel,
        target=job.facts.capability,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=registers,
        spill_bytes=spill,
        shared_bytes=metadata.shared,
        wgmma="wgmma" in compiled.asm["ptx"],
        source=job.source,
        key=job.key,
        is_memory_bound=machine_code is None or job.launch.arguments.get("BLOCK_M", 0) < SHARING_ROWS,
        hot_loop=hot_loop(machine_code) if machine_code else None,
        consumer_groups=consumer_groups,
        bulk_bytes=sum(map(int, EXPECTED.findall(compiled.asm["ptx"]))) if consumer_groups else 0,
    )
    check_fits(result, job.facts)
    check_overlaps(result)
    return result


def check_fits(result: Compiled, facts: DeviceFacts) -> None:
    """Raises CannotLaunch with the number that is too large."""
    if result.shared_bytes > facts.shared_bytes:
        raise CannotLaunch(
            f"{result.case}: {result.kernel} for sm_{result.target} asks for {result.shared_bytes} bytes of shared "
            f"memory; a thread block there has {facts.shared_bytes}. Use smaller tiles or fewer stages"
        )
    needed = result.registers * result.num_warps * THREADS_PER_WARP
    if needed > REGISTERS_PER_SM:
        raise CannotLaunch(
            f"{result.case}: {result.kernel} for sm_{result.target} needs {needed} registers with {result.num_warps} "
            f"warps; a multiprocessor has {REGISTERS_PER_SM}. Use smaller tiles"
        )


def check_overlaps(result: Compiled) -> None:
    """Raises Serialised. The assembler falls back to it in silence when accumulators meet other definitions of their
    registers (a loop of products that may run zero times) or there are too few registers."""
    if result.hot_loop is not None and result.hot_loop.is_serialised:
        raise Serialised(
            f"{result.case}: {result.kernel} waits {result.hot_loop.waits} times for {result.hot_loop.products} matrix "
            f"products. Enter the loop only where it runs at least once, or use smaller tiles or more warps"
        )


def _dump(cubin: bytes, option: str) -> str:
    """What cuobjdump says of it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def _machine_code_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack and local memory per thread)."""
    text = _dump(cubin, "--dump-resource-usage")
    found = USAGE.search(text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text[:200]}")
    return int(found[1]), int(found[2]) + int(found[4])


def load(cache: Path, key: str) -> Compiled | None:
    """What an earlier run found for this key; None when there is none, or the file is of another version."""
    try:
        entry = json.loads((cache / f"{key}.json").read_text())
        return Compiled.of_entry(entry) if "hot_loop" in entry else None
    except (OSError, ValueError, TypeError):
        return None


def store(cache: Path, result: Compiled) -> None:
    """Keep for later runs. Written beside and renamed, so that a reader never sees half a file."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache, suffix=".tmp", delete=False) as file:
        json.dump(asdict(result), file)
    Path(file.name).replace(cache / f"{result.key}.json")
