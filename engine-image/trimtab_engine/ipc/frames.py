"""The worker's side of bounded_worker.py: length-prefixed msgpack frames on stdin and stdout, one answer each.

A worker does what may never end, take all memory or crash: it is there to be killed, and it is the first that the
kernel takes when memory runs out.
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

from trimtab_engine.ipc.tie import end_with_parent

PREFIX = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20  # a tokenizer of 250,000 tokens is a tenth of it
MAX_ADDRESS_BYTES = 4 << 30  # by default; far above what honest work takes: a runaway ends here, not with the container
FIRST_TO_BE_KILLED = "1000"  # the highest oom_score_adj


def encode_frame(body: Any) -> bytes:
    data = msgspec.msgpack.encode(body)
    return PREFIX.pack(len(data)) + data


def serve_frames(start: Callable[[Any], Callable[[Any], Any]], *, max_address_bytes: int = MAX_ADDRESS_BYTES) -> None:
    """Answer until stdin ends. The first frame is `start`'s argument; what it returns answers the others.

    `start` answers {"ready": True}. What the handler raises is an answer, too: {"failed": its text}.
    """
    _be_expendable(max_address_bytes)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints, prints there: the pipe is for frames
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
        except Exception as error:  # whatever a template or a grammar makes of us is the answer to it
            body = {"failed": f"{type(error).__name__}: {error}"}


def _read(reader: Any) -> Any:
    """The next frame's body; None at the end."""
    prefix = reader.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    return msgspec.msgpack.decode(reader.read(PREFIX.unpack(prefix)[0]))


def _be_expendable(max_address_bytes: int) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends us
    resource.setrlimit(resource.RLIMIT_AS, (max_address_bytes, max_address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not everywhere allowed; without it the kernel chooses by size
        Path(f"/proc/{os.getpid()}/oom_score_adj").write_text(FIRST_TO_BE_KILLED)
