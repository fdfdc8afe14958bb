"""The worker's side of bounded_worker.py: length-prefixed msgpack frames on stdin and stdout, one answer each.

A worker runs untrusted work that may hang, exhaust memory or crash. It may be killed at any time and is the first
victim of the kernel's OOM killer.
"""

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trimtab_engine.ipc.parent_death import exit_with_parent

PREFIX = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20  # a tokenizer of 250,000 tokens is a tenth of it
MAX_ADDRESS_BYTES = 4 << 30  # by default; far above what honest work takes: a runaway ends here, not with the container
MAX_OOM_SCORE_ADJ = "1000"  # the highest oom_score_adj


def encode_frame(body: Any) -> bytes:
    data = msgspec.msgpack.encode(body)
    return PREFIX.pack(len(data)) + data


def serve_frames(start: Callable[[Any], Callable[[Any], Any]], *, max_address_bytes: int = MAX_ADDRESS_BYTES) -> None:
    """Answer frames until stdin ends. The first frame is `start`'s argument; its result handles the others. `start` is
    answered with {"ready": True}, exceptions of the handler with {"failed": text}.
    """
    _prefer_oom_kill(max_address_bytes)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # stdout is the frame pipe: prints go to stderr
    first = _read(reader)
    if first is None:
        return
    handle = start(first)
    body: Any = {"ready": True}
    while True:
        writer.write(encode_frame(body))
        writer.flush()
        request = _read(reader)
        if request is None:
            return
        try:
            body = handle(request)
        except Exception as error:  # every failure caused by a template or a grammar is an answer
            body = {"failed": f"{type(error).__name__}: {error}"}


def _read(reader: Any) -> Any:
    """Return the next frame's body; None at the end."""
    prefix = reader.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    return msgspec.msgpack.decode(reader.read(PREFIX.unpack(prefix)[0]))


def _prefer_oom_kill(max_address_bytes: int) -> None:
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends us
    resource.setrlimit(resource.RLIMIT_AS, (max_address_bytes, max_address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not everywhere allowed; without it the kernel chooses by size
        Path(f"/proc/{os.getpid()}/oom_score_adj").write_text(MAX_OOM_SCORE_ADJ)
