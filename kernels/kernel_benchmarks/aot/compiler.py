"""Compilation of a specialised kernel for a device that is not present, and of its resource usage.

Registers, stack and shared memory are read from the machine code by the `cuobjdump` of Triton's package; for Hopper,
the hot loop is analysed as well. A kernel that no device of its target can start is an error here instead of at its
first launch, and so is one whose warp-group instructions the assembler serialised.
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

from kernel_benchmarks.aot.async_mma import check_mma
from kernel_benchmarks.aot.bounds import Bound, bound
from kernel_benchmarks.aot.machine_code import Loop, hot_loop, instructions_of
from kernel_benchmarks.aot.specialisation import Specialisation, specialise

REGISTERS_PER_SM = 65536
"""32-bit registers of a multiprocessor, in every supported generation; a thread block's must fit."""
THREADS_PER_WARP = 32
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
EXPECTED = re.compile(r"mbarrier\.arrive\.expect_tx\S* _, \[\S+\], (\d+);")
"""Matches the bytes expected by the tensor memory accelerator's copies in a kernel's PTX."""

SHARING_ROWS = 128
"""Tiles at least this tall are for many tokens: CTAs share their operands in the L2 cache. Lower ones are for few
tokens and read each byte of weights or keys from memory once."""


class CannotLaunch(Exception):
    """The kernel compiles, but exceeds the resources of the target's devices."""


class Serialised(Exception):
    """The kernel compiles, but its matrix instructions cannot overlap."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one target. `spill_bytes` per thread use local memory; `source` is the hash of kernel code;
    `hot_loop` is analysed for sm_90 only. With warp specialisation (`consumer_groups`), num_warps counts all warps,
    the hot loop is one consumer group's, and `bulk_bytes` are the bytes copied by the tensor memory accelerator per
    pass.
    """

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
        """Parse an entry of a results file.

        Raises:
            TypeError: the entry is of another version.
        """
        loop = entry.get("hot_loop")
        return cls(**{**entry, "hot_loop": Loop(**loop) if loop else None})

    @property
    def bound(self) -> Bound | None:
        """Upper bound of the hot loop's speed; None if it was not analysed."""
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
    """A compilation. `key` identifies it and is equal for equal results."""

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
    """Compile; takes seconds. Also raises Triton's exceptions.

    Raises:
        CannotLaunch: the kernel exceeds the target's resources.
        UnsafeMma: a matrix instruction may be wrong.
        Serialised: matrix instructions do not overlap.
    """
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
        check_mma(f"{job.case}: {kernel}", instructions_of(machine_code))
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
    """Check the resources.

    Raises:
        CannotLaunch: with the number that is too large.
    """
    if result.shared_bytes > facts.shared_bytes:
        raise CannotLaunch(
            f"{result.case}: {result.kernel} for sm_{result.target} needs {result.shared_bytes} bytes of shared "
            f"memory; a thread block there has {facts.shared_bytes}. Use smaller tiles or fewer stages"
        )
    needed = result.registers * result.num_warps * THREADS_PER_WARP
    if needed > REGISTERS_PER_SM:
        raise CannotLaunch(
            f"{result.case}: {result.kernel} for sm_{result.target} needs {needed} registers with {result.num_warps} "
            f"warps; a multiprocessor has {REGISTERS_PER_SM}. Use smaller tiles"
        )


def check_overlaps(result: Compiled) -> None:
    """Check that matrix instructions overlap. The assembler serialises them silently if accumulators have other
    definitions of their registers (a loop of matrix instructions that may run zero times) or registers are too few.

    Raises:
        Serialised: they do not overlap.
    """
    if result.hot_loop is not None and result.hot_loop.is_serialised:
        raise Serialised(
            f"{result.case}: {result.kernel} waits {result.hot_loop.waits} times for {result.hot_loop.products} matrix "
            f"instructions. Enter the loop only if it runs at least once, or use smaller tiles or more warps"
        )


def _dump(cubin: bytes, option: str) -> str:
    """Return cuobjdump's output."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def _machine_code_usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, bytes of stack and local memory per thread)."""
    text = _dump(cubin, "--dump-resource-usage")
    found = USAGE.search(text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text[:200]}")
    return int(found[1]), int(found[2]) + int(found[4])


def load(cache: Path, key: str) -> Compiled | None:
    """Return an earlier run's result for this key, or None if there is none or the file is of another version."""
    try:
        entry = json.loads((cache / f"{key}.json").read_text())
        return Compiled.of_entry(entry) if "hot_loop" in entry else None
    except (OSError, ValueError, TypeError):
        return None


def store(cache: Path, result: Compiled) -> None:
    """Store a result for later runs. The file is replaced atomically."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache, suffix=".tmp", delete=False) as file:
        json.dump(asdict(result), file)
    Path(file.name).replace(cache / f"{result.key}.json")
