"""Work that may never end, in processes that can be killed: chat templates and grammars.

A pool starts its processes when they are needed, at most `max_workers` of them. A call that runs past its limit kills
its process, and a new one takes its place with the next call; no other request waits for it meanwhile.
"""

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from trimtab_engine.ipc.frames import MAX_FRAME_BYTES, PREFIX, encode_frame

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A worker is single-threaded; one thread per CPU would take its address space."""
START_SECONDS = 60.0  # for a process to start and load its data; about 0.5 s on an idle machine


class WorkerError(Exception):
    """A call brought no answer."""


class WorkerTimeout(WorkerError):
    """The call exceeded its time limit and the worker was killed."""


class WorkerEnded(WorkerError):
    """The worker process ended: it crashed, or exceeded its memory limit."""


class InvalidText(WorkerError):
    """The request contains a lone surrogate, which UTF-8 cannot encode. No process was called."""


class WorkersBusy(WorkerError):
    """Too many calls wait already."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits: `seconds` of wall time for one running call, the number of concurrent calls, and of waiting calls."""

    seconds: float
    max_workers: int
    max_waiting: int


class WorkerPool:
    """Processes `python -m module`, each given `start` first (see frames.py)."""

    def __init__(self, module: str, start: Any, limits: WorkerLimits) -> None:
        self._module, self._start, self._limits = module, start, limits
        self._free = asyncio.Semaphore(limits.max_workers)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._ending: set[asyncio.Task[int]] = set()
        self._num_waiting = 0

    async def call(self, request: Any) -> Any:
        """Return the worker's answer. Raises a WorkerError when there is none."""
        try:
            frame = encode_frame(request)
        except UnicodeEncodeError:
            raise InvalidText("it holds half of a surrogate pair, which is no text") from None
        if self._num_waiting >= self._limits.max_waiting:
            raise WorkersBusy
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            return await self._call(frame)
        finally:
            self._free.release()

    async def _call(self, frame: bytes) -> Any:
        worker = self._idle.pop() if self._idle else await self._started()
        answered = False
        try:
            answer = await worker.ask(frame, self._limits.seconds)
            answered = True
            return answer
        finally:  # cancelled in the middle, its answer would be the next one's
            if answered:
                self._idle.append(worker)
            else:
                self._end(worker)

    async def _started(self) -> "_Worker":
        worker = _Worker(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the server, which ends this one
            )
        )
        self._workers.add(worker)
        try:
            await worker.ask(encode_frame(self._start), START_SECONDS)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: "_Worker") -> None:
        self._workers.discard(worker)
        task = asyncio.create_task(worker.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all processes; calls in progress raise WorkerEnded."""
        self._idle.clear()
        for worker in list(self._workers):
            self._end(worker)
        await asyncio.gather(*self._ending)


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, frame: bytes, seconds: float) -> Any:
        try:
            return await asyncio.wait_for(self._exchange(frame), seconds)
        except TimeoutError:
            raise WorkerTimeout(f"it took more than {seconds:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise WorkerEnded("its process ended") from None

    async def _exchange(self, frame: bytes) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(frame)
        await self._process.stdin.drain()
        (length,) = PREFIX.unpack(await self._process.stdout.readexactly(PREFIX.size))
        if length > MAX_FRAME_BYTES:
            raise WorkerEnded("its answer is too large")
        return msgspec.msgpack.decode(await self._process.stdout.readexactly(length))

    async def end(self) -> int:
        """Kill it and wait for that, a matter of milliseconds. Returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()
