"""Selection of the compiled library for this CPU, which uses torch's threads.

The library takes plain addresses, so one file works with every version of Python and torch. Its threads are those of
the OpenMP runtime that torch has loaded: a second pool would spin and compete with the first.
"""

import ctypes
import fcntl
import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trimtab_kernels.native.build import FOLDER, INSTRUCTION_SETS, build, library_name, sources_hash

logger = logging.getLogger(__name__)

NEEDED_FLAGS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
    "armv8-a": set[str](),
}
"""Flags of /proc/cpuinfo; v4's include v3's on every CPU that has them."""
THREAD_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class MatrixView(ctypes.Structure):
    """`Matrix` of gemm.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("out", ctypes.c_long),
        ("in_", ctypes.c_long),
        ("is_quantised", ctypes.c_long),
    )


@dataclass(frozen=True, slots=True)
class NativeUnavailable:
    """The reason why there are no compiled operators."""

    reason: str


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library. `functions` are those of layers.c."""

    instruction_set: str
    panel: int
    """Outputs per panel of a packed weight."""
    functions: Any
    has_threads: bool

    @property
    def num_threads(self) -> int:
        """Number of threads of the next call: torch's."""
        return torch.get_num_threads() if self.has_threads else 1


@cache
def native_library() -> NativeLibrary | NativeUnavailable:
    """Return the compiled operators for this CPU: of the package, of the user's cache, or compiled now into the cache.

    Cached per process. A source tree and a wheel that was built without a compiler contain no libraries.
    """
    packaged = load_library(FOLDER)
    if isinstance(packaged, NativeLibrary) or not usable_instruction_sets():
        return packaged
    return compiled_in_cache(cache_folder())


def user_cache() -> Path:
    """Return the user's cache folder: $TRIMTAB_CACHE, else $XDG_CACHE_HOME/trimtab."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TRIMTAB_CACHE") or f"{caches}/trimtab")


def cache_folder() -> Path:
    """Return the user's folder for libraries of these sources."""
    return user_cache() / "native" / sources_hash()[:16]


def compiled_in_cache(folder: Path) -> NativeLibrary | NativeUnavailable:
    """Return the library in `folder`, after compiling it for the best instruction set of this CPU if it is not there.

    A lock makes the ranks of one engine compile once.
    """
    best = usable_instruction_sets()[0]
    path = folder / library_name(best)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                logger.info("CPU operators: compiling for %s into %s (once per version, some seconds)", best, folder)
                build(folder, only=best)
    except (RuntimeError, OSError) as error:
        return NativeUnavailable(f"the package contains none, and compiling them failed: {error}")
    return open_library(path, best)


def load_library(folder: Path) -> NativeLibrary | NativeUnavailable:
    """Return the best library in `folder` that this CPU can run."""
    usable = usable_instruction_sets()
    if not usable:
        return NativeUnavailable(f"there are none for this CPU ({platform.machine()})")
    for name in usable:
        path = folder / library_name(name)
        if path.is_file():
            return open_library(path, name)
    return NativeUnavailable("they were not compiled; run python -m trimtab_kernels.native.build")


def usable_instruction_sets() -> list[str]:
    """Return the instruction sets of this CPU, the best first."""
    flags = _cpu_flags()
    return [name for name in INSTRUCTION_SETS.get(platform.machine(), {}) if NEEDED_FLAGS[name] <= flags]


def open_library(path: Path, name: str) -> NativeLibrary | NativeUnavailable:
    """Load one library without checking the CPU."""
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return NativeUnavailable(f"{path.name} does not load: {error}")
    functions.trimtab_sources.restype = ctypes.c_char_p
    if functions.trimtab_sources().decode() != sources_hash():
        return NativeUnavailable(
            f"{path.name} was compiled from other sources; run python -m trimtab_kernels.native.build"
        )
    pointer, long = ctypes.c_void_p, ctypes.c_long
    functions.trimtab_use_threads.argtypes = (pointer, pointer, pointer)
    functions.trimtab_use_threads.restype = None
    functions.trimtab_panel.restype = long
    functions.trimtab_scratch.argtypes = (pointer, long)
    functions.trimtab_scratch.restype = long
    functions.trimtab_layers.argtypes = (pointer, pointer, long, long, ctypes.c_int, pointer, pointer)
    functions.trimtab_multiply.argtypes = (pointer, pointer, long, long, pointer, long, ctypes.c_int, long, pointer)
    functions.trimtab_multiply.restype = None
    functions.trimtab_pack.argtypes = (long, pointer, long, long, pointer, long)
    functions.trimtab_pack.restype = None
    functions.trimtab_gemm_scratch.argtypes = (pointer, long)
    functions.trimtab_gemm_scratch.restype = long
    functions.trimtab_panel_bytes.argtypes = (long, long)
    functions.trimtab_panel_bytes.restype = long
    functions.trimtab_pack_blocks.argtypes = (long, pointer, long, long, long, pointer, long)
    functions.trimtab_pack_blocks.restype = None
    runtime = _openmp_runtime()
    if runtime is not None:
        functions.trimtab_use_threads(*(ctypes.cast(getattr(runtime, f), pointer) for f in THREAD_FUNCTIONS))
    return NativeLibrary(name, functions.trimtab_panel(), functions, runtime is not None)


def _cpu_flags() -> set[str]:
    """Return the CPU's flags from /proc/cpuinfo; empty if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    words = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return set(words.split())


def _openmp_runtime() -> ctypes.CDLL | None:
    """Return torch's OpenMP runtime if it has GNU's interface, or None. If several are loaded, torch's cannot be
    identified.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line and "omp" in line.rpartition("/")[2]}
    if len(paths) != 1:
        return None
    runtime = ctypes.CDLL(paths.pop())
    return runtime if all(hasattr(runtime, name) for name in THREAD_FUNCTIONS) else None
