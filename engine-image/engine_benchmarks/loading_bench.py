"""Loading rate of weights from disk, compared with the disk's read rate, in one run.

The model is copied, so that no other process maps its pages, and its page cache is dropped before each measurement; the
remaining share is checked. Rounds alternate, medians count:

```
read    all files, in order, in large pieces     the disk
cold    every rank's weights are loaded          the disk, conversion, packing
warm    the same from the page cache             only conversion and packing
```

Ranks are processes of one machine: they read from one disk, and parts of the same files.

    python -m engine_benchmarks.loading_bench MODEL --folder FOLDER --ranks 1 --ranks 2

For a larger model, see engine_benchmarks.random_checkpoint.
"""

import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.executor.start import load_rank

PIECE_BYTES = 8 << 20
NUM_PROBES, PAGE_BYTES = 64, 4096
MOST_RESIDENT = 0.05  # maximum share of resident probes: with more, the files were not cold
ROUNDS = 5


@dataclass(slots=True)
class Measured:
    """One layout: bytes of the files, and the seconds of every round."""

    ranks: int
    file_bytes: int
    read_seconds: list[float] = field(default_factory=list)
    cold_seconds: list[float] = field(default_factory=list)
    warm_seconds: list[float] = field(default_factory=list)

    def rate(self, seconds: Sequence[float]) -> float:
        """Median GB/s."""
        return self.file_bytes / statistics.median(seconds) / 1e9

    @property
    def share(self) -> float:
        """Share of the disk's rate: the median over rounds of read time over load time."""
        pairs = zip(self.read_seconds, self.cold_seconds, strict=True)
        return statistics.median(read / cold for read, cold in pairs)

    def summary(self) -> dict[str, object]:
        rates = {name: self.rate(getattr(self, f"{name}_seconds")) for name in ("read", "cold", "warm")}
        each = {
            name: [round(second, 3) for second in seconds] for name, seconds in asdict(self).items() if "_s" in name
        }
        return {
            "ranks": self.ranks,
            "file_gigabytes": round(self.file_bytes / 1e9, 3),
            "gigabytes_per_second": {name: round(rate, 3) for name, rate in rates.items()},
            "share_of_read": round(self.share, 3),
            **each,
        }


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(files: Sequence[Path]) -> None:
    """Drop the files from the page cache. Pages that are not yet on the disk, or mapped by another process, stay."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(files: Sequence[Path]) -> float:
    """Estimate the share of the files in the page cache, by reads of pages that do not block."""
    found = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        last = (os.fstat(descriptor).st_size - 1) // PAGE_BYTES
        for probe in range(NUM_PROBES):
            try:
                place = last * probe // (NUM_PROBES - 1) * PAGE_BYTES
                os.preadv(descriptor, [bytearray(PAGE_BYTES)], place, os.RWF_NOWAIT)
                found += 1
            except BlockingIOError:
                pass
        os.close(descriptor)
    return found / (NUM_PROBES * len(files))


def make_cold(files: Sequence[Path]) -> None:
    """Drop the files.

    Raises:
        RuntimeError: the pages stay in memory.
    """
    drop(files)
    share = resident_share(files)
    if share > MOST_RESIDENT:
        raise RuntimeError(f"{share:.0%} of the files stay in the page cache: nothing cold can be measured here")


def read_all(files: Sequence[Path]) -> float:
    """Return the seconds of reading the files in order, piece by piece, with one thread."""
    piece, began = bytearray(PIECE_BYTES), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass
    return time.perf_counter() - began


def load(folder: Path, ranks: int, threads: int) -> float:
    """Return the seconds from the first rank's first weight until all ranks have theirs. Process start and imports are
    excluded.
    """
    began: list[float] = []

    def note(stage: str, percent: float) -> None:
        if stage == "weights":
            began.append(time.perf_counter())

    config = EngineConfig(model=str(folder), tensor_parallel_size=ranks, cpu_threads=threads, dtype="float32")
    loaded = load_rank(config, note, None)
    seconds = time.perf_counter() - began[0]
    loaded.runner.close()
    return seconds


def measure(folder: Path, ranks: int, rounds: int, threads: int, loads: Callable[..., float] = load) -> Measured:
    files = weight_files(folder)
    measured = Measured(ranks, sum(file.stat().st_size for file in files))
    for _ in range(rounds):
        make_cold(files)
        measured.read_seconds.append(read_all(files))
        make_cold(files)
        for seconds in (measured.cold_seconds, measured.warm_seconds):
            seconds.append(loads(folder, ranks, threads))
            gc.collect()  # free the model, whose memory the next one gets, and whose tables may be views of the files
    return measured


def copy_of(model: Path, folder: Path) -> Path:
    """Copy the model to separate files on the disk."""
    copy = folder / model.name
    shutil.copytree(model, copy, dirs_exist_ok=True)
    os.sync()
    return copy


def main(
    model: Annotated[Path, typer.Argument(help="folder with safetensors")],
    folder: Annotated[Path, typer.Option(help="on the disk to measure; gets a copy of the model")],
    ranks: Annotated[
        list[int] | None, typer.Option(help="tensor-parallel ranks; may be repeated; 1 is the default")
    ] = None,
    rounds: int = ROUNDS,
    threads: int = 1,
) -> None:
    """Measure and print JSON."""
    copy = copy_of(model, folder)
    layouts = [measure(copy, number, rounds, threads).summary() for number in ranks or [1]]
    summary = {"model": model.name, "threads": threads, "load_average": os.getloadavg()[0], "layouts": layouts}
    json.dump(summary, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    typer.run(main)
