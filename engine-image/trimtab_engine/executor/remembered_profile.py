"""Memory of activations that an earlier start measured, checked by small steps instead of measured again.

On the CPU the memory of a step depends only on the values in the key, because it is counted as requests to torch
(ADR-0017). An entry is used only if its key is equal, and if small steps that run now need exactly the memory that they
needed when the entry was written. Entries are of single ranks: several ranks profile in collectives, so that all of
them must measure or none.
"""

import contextlib
import hashlib
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
import trimtab_kernels
from trimtab_kernels.native.library import NativeLibrary, native_library, user_cache

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.allocations import Growth
from trimtab_engine.memory.encoder import EncoderLimits
from trimtab_engine.memory.reserved import cpu_activation_bytes
from trimtab_engine.runner.model_runner import ModelFacts, ModelRunner

MAX_ENTRIES = 64  # of some hundred bytes; the oldest are removed

logger = logging.getLogger("trimtab_engine.core")


class Entry(msgspec.Struct, frozen=True):
    """A remembered profile. Sizes are in bytes."""

    key: str
    probe_kept: int
    probe_peak: int
    """Memory of the small steps."""
    activations: int
    """Memory of the envelope's steps, including buffers that small steps allocate once."""
    digest: str
    """Of the other fields: detects a damaged file."""

    @classmethod
    def of(cls, key: str, probe: Growth, activations: int) -> "Entry":
        return cls(key, probe.kept, probe.peak, activations, _digest(key, probe, activations))

    def is_confirmed_by(self, key: str, probe: Growth) -> bool:
        """Return True if the entry was written for this key and these small steps, and is not damaged."""
        return self == Entry.of(key, probe, self.activations) and self.activations >= probe.peak


def profile(config: EngineConfig, runner: ModelRunner, encoder: EncoderLimits, num_threads: int) -> int:
    """Return the memory of steps on the CPU in bytes, from an earlier start if small steps confirm it."""
    return remembered(
        profile_key(config, runner.facts, num_threads),
        probe=runner.probe,
        measure=lambda: runner.profile(config.max_num_batched_tokens_cap, config.max_num_sampled_rows, encoder),
        folder=user_cache() / "profiles",
    )


def remembered(key: str, probe: Callable[[], Growth], measure: Callable[[], int], folder: Path) -> int:
    """Return the result of probe() and measure(): without measure() if an earlier call had this key and probe."""
    path = folder / f"{key}.json"
    entry, small = _read(path), probe()
    if entry is not None and entry.is_confirmed_by(key, small):
        logger.info("profile: %.0f MiB of activations, measured by an earlier start", entry.activations / (1 << 20))
        return entry.activations
    # Buffers that the small steps allocate once are held during the others.
    activations = max(cpu_activation_bytes(small.peak, 0), cpu_activation_bytes(small.kept, 0) + measure())
    _write(path, Entry.of(key, small, activations))
    return activations


def profile_key(config: EngineConfig, facts: ModelFacts, num_threads: int) -> str:
    """Return a hash of everything that determines the memory of a step on the CPU."""
    native = native_library()
    parts = {
        "config": msgspec.to_builtins(msgspec.structs.replace(config, data_parallel_rendezvous=None)),
        "facts": repr(facts),
        "versions": [version("trimtab"), str(torch.__version__), platform.python_version()],
        "sources": [
            _sources(folder) for folder in (Path(__file__).parents[1], Path(str(trimtab_kernels.__file__)).parent)
        ],
        "cpu": [
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            native.instruction_set if isinstance(native, NativeLibrary) else native.reason,
        ],
        "threads": num_threads,
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def _sources(folder: Path) -> str:
    """Return a hash of the names, sizes and times of sources, for development without a new version."""
    found = sorted((str(path.relative_to(folder)), path.stat()) for path in folder.rglob("*.py"))
    return hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]).encode()).hexdigest()


def _digest(key: str, probe: Growth, activations: int) -> str:
    return hashlib.sha256(f"{key} {probe.kept} {probe.peak} {activations}".encode()).hexdigest()


def _read(path: Path) -> Entry | None:
    """Return the entry, or None if there is none that this user has written."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, entry: Entry) -> None:
    """Write the entry atomically. A cache that cannot be written only makes the next start slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(entry))
        partial.replace(path)
        newest_first = sorted(path.parent.iterdir(), key=lambda file: -file.stat().st_mtime)
        for file in newest_first[MAX_ENTRIES:]:
            file.unlink(missing_ok=True)
