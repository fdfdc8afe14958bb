"""What an engine on the CPU sets aside for its own processes: `other` of the memory formula.

A rule instead of a measurement: what a process holds depends on how far it has come, and the number of KV blocks must
not. The sizes are what the processes hold while they serve, rounded up (docs/concepts/kv-memory.md has the table
and what is not in it).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

MIB = 1 << 20
RANK_BYTES = 176 * MIB
"""What every rank's process holds: the interpreter, torch, the scheduler, the sockets' buffers."""
API_SERVER_BYTES = 80 * MIB
"""What every API server holds: the interpreter, the HTTP server, requests on their way, the process that renders
chats."""
TOKENIZER_BYTES_PER_TOKEN = 1024
"""What the tokenizer of every API server holds for each token of the vocabulary."""
MEDIA_WORKERS_BYTES = 4 * 32 * MIB
"""What the processes hold that decode images and videos for an API server: the interpreter, Pillow, a photograph."""
FIRST_PROCESS_BYTES = 48 * MIB
"""What a node's first process holds where it serves no requests itself: it starts the others and has the admin API."""
ACTIVATION_MARGIN = Fraction(5, 4)
"""What a step holds of the heap for each byte that it asks for: what is free lies in pieces."""
ROW_SIZE_BYTES = 4 * MIB
"""Code that oneDNN compiles for each number of rows of a product, where products are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """An engine's processes on one node. `num_ranks` are all that there may be there."""

    num_ranks: int
    num_api_servers: int
    has_first_process: bool
    """Whether one more only looks after the others."""
    media_cache_bytes: int | None = None
    """What each API server and each engine core keeps of images and videos; None: the model takes text alone."""
    num_media_caches: int = 0
    """How many of them keep so much."""


def reserved_bytes(processes: Processes, vocab_size: int) -> int:
    """What one rank's device sets aside: for its own process, and its part of what all ranks have in common."""
    servers = processes.num_api_servers * (API_SERVER_BYTES + TOKENIZER_BYTES_PER_TOKEN * vocab_size)
    shared = servers + FIRST_PROCESS_BYTES * processes.has_first_process + _media_bytes(processes)
    return RANK_BYTES - (-shared // processes.num_ranks)


def _media_bytes(processes: Processes) -> int:
    """Of images and videos, in all processes of the node."""
    if processes.media_cache_bytes is None:
        return 0
    kept = processes.num_media_caches * processes.media_cache_bytes
    return kept + processes.num_api_servers * MEDIA_WORKERS_BYTES


def cpu_activation_bytes(asked_bytes: int, num_row_sizes: int) -> int:
    """What steps take on the CPU that ask torch for so much at once. `num_row_sizes`: for how many numbers of rows
    oneDNN compiles code; 0 where the products are not its own."""
    return math.ceil(asked_bytes * ACTIVATION_MARGIN) + num_row_sizes * ROW_SIZE_BYTES
