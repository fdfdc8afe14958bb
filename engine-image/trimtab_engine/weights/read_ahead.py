"""Prefetches the next parts of weight files, so that the disk reads while weights are converted and packed. Mapped
files are read on first access: without prefetching, disk and processor wait for each other in turn.

A thread does it, because the call blocks while the disk is busy; and in pieces, because Linux reads only the beginning
of a piece that is larger than its own read-ahead.
"""

import os
import re
import struct
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

AHEAD_BYTES = 256 << 20  # of the tensors after the wanted one: as much as a disk reads in a tenth of a second or two
PIECE_BYTES = 128 << 10  # Linux's default read-ahead (queue/read_ahead_kb)
NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    file: Path
    first: int
    """Offset of its bytes in the file."""
    num_bytes: int


class ReadAhead:
    """Sort key for load order: layers in numerical order, then tables and other tensors outside the layers."""

    def __init__(self, files: Mapping[Path, Mapping[str, Any]]) -> None:
        """`files`: each file's header (safetensors_files.read_header)."""
        places = [
            _Place(name, file, first + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
            for file, header in files.items()
            for first in (_data_begins(file),)
            for name, entry in header.items()
        ]
        self._places = sorted(places, key=lambda place: _order(place.name))
        self._keys = [_order(place.name) for place in self._places]
        self._asked: set[int] = set()
        self._asking: SimpleQueue[_Place | None] = SimpleQueue()
        # Nothing joins the thread: a failed load ends at once, even if prefetches are pending.
        Thread(target=_ask_in_turn, args=(self._asking,), name="read-ahead", daemon=True).start()
        finalize(self, self._asking.put, None)

    def wanted(self, name: str) -> None:
        """Prefetch this tensor and the following ones, once each."""
        room = AHEAD_BYTES
        for index in range(bisect_left(self._keys, _order(name)), len(self._places)):
            place = self._places[index]
            if place.name != name:
                room -= place.num_bytes
                if room < 0:
                    return
            if index not in self._asked:
                self._asked.add(index)
                self._asking.put(place)


def _order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """layers.2 before layers.10, and both before the embeddings."""
    parts = NUMBER.split(name)
    return len(parts) == 1, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _data_begins(file: Path) -> int:
    with file.open("rb") as stream:
        length: int = struct.unpack("<Q", stream.read(8))[0]
    return 8 + length


def _ask_in_turn(asking: "SimpleQueue[_Place | None]") -> None:
    """Iterate over the queue until None."""
    while (place := asking.get()) is not None:
        _ask(place)


def _ask(place: _Place) -> None:
    """Advise the kernel; if that is not possible, the file is read on access."""
    with suppress(OSError):
        descriptor = os.open(place.file, os.O_RDONLY)
        try:
            last = place.first + place.num_bytes
            for first in range(place.first, last, PIECE_BYTES):
                os.posix_fadvise(descriptor, first, min(PIECE_BYTES, last - first), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
