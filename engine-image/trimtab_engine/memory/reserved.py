"""Memory reserved for an engine's processes on the CPU: `other` of the memory formula.

A rule is used instead of a measurement, because process sizes vary over time and the number of KV blocks must not. The
sizes are those of serving processes, rounded up (docs/concepts/kv-memory.md has the table and the exclusions).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

MIB = 1 << 20
RANK_BYTES = 176 * MIB
"""Bytes of every rank's process: interpreter, torch, scheduler, socket buffers."""
API_SERVER_BYTES = 80 * MIB
"""Bytes of every API server: interpreter, HTTP server, pending requests, and the chat rendering process."""
TOKENIZER_BYTES_PER_TOKEN = 1024
"""Tokenizer bytes of every API server per vocabulary token."""
MEDIA_WORKERS_BYTES = 4 * 32 * MIB
"""Bytes of the processes that decode images and videos for an API server: interpreter, Pillow, a photograph."""
FIRST_PROCESS_BYTES = 48 * MIB
"""Bytes of a node's first process if it serves no requests: it starts the others and has the admin API."""
ACTIVATION_MARGIN = Fraction(5, 4)
"""Heap bytes of a step per requested byte, because free memory is fragmented."""
ROW_SIZE_BYTES = 4 * MIB
"""Code that oneDNN compiles for each number of rows of a product, where products are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """An engine's processes on one node. `num_ranks` are all that there may be there."""

    num_ranks: int
    num_api_servers: int
    has_first_process: bool
    """True if a separate process manages the others."""
    media_cache_bytes: int | None = None
    """Image and video cache bytes of each API server and each engine core. None for a text-only model."""
    num_media_caches: int = 0
    """Number of such caches."""


def reserved_bytes(processes: Processes, vocab_size: int) -> int:
    """Return the bytes reserved on one rank's device: for its own process, and its share of common processes."""
    servers = processes.num_api_servers * (API_SERVER_BYTES + TOKENIZER_BYTES_PER_TOKEN * vocab_size)
    shared = servers + FIRST_PROCESS_BYTES * processes.has_first_process + _media_bytes(processes)
    return RANK_BYTES - (-shared // processes.num_ranks)


def _media_bytes(processes: Processes) -> int:
    """Return the image and video bytes of all processes of the node."""
    if processes.media_cache_bytes is None:
        return 0
    kept = processes.num_media_caches * processes.media_cache_bytes
    return kept + processes.num_api_servers * MEDIA_WORKERS_BYTES


def cpu_activation_bytes(asked_bytes: int, num_row_sizes: int) -> int:
    """Return the CPU memory of steps that request `asked_bytes` from torch at once. `num_row_sizes`: number of row
    counts for which oneDNN compiles code; 0 without oneDNN matmuls.
    """
    return math.ceil(asked_bytes * ACTIVATION_MARGIN) + num_row_sizes * ROW_SIZE_BYTES
