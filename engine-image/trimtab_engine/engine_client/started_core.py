"""An engine core's process as the one sees it that starts it: start, why it ended, orderly end."""

import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass

import msgspec

from trimtab_engine.config.engine import core_environment
from trimtab_engine.errors import EngineDead
from trimtab_engine.ipc.tie import tied_environment
from trimtab_engine.messages import CoreStart

CORE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.core.process")
SHUTDOWN_SECONDS = 5.0  # for the core to leave its loop before it is killed
DEAD_GRACE_SECONDS = 0.5  # for the core's last message, which says why, to arrive after its process has ended


@dataclass(frozen=True, slots=True)
class StartedCore:
    """A started core. `index` is its data-parallel rank."""

    index: int
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, index: int, start: CoreStart) -> "StartedCore":
        """Raises EngineDead when there can be no process."""
        try:
            process = await asyncio.create_subprocess_exec(
                *CORE_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                env=tied_environment(core_environment()),
                start_new_session=True,  # Ctrl-C is for the first process, which ends this one in order
            )
        except OSError as error:
            raise EngineDead(f"the engine core's process cannot be started: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already: whoever waits for its end hears so
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            await process.stdin.drain()
        return cls(index, process)

    async def end(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Wait for its end; kill it after `seconds`."""
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def cause_of_end(name: str, code: int, loading_stage: str | None) -> str:
    """Words for an end that a core could not tell of itself. `loading_stage`: of a core that was not ready yet. The
    kernel kills what exceeds the container's memory."""
    if code == -signal.SIGKILL and loading_stage is not None:
        return (
            f"{name} was killed (signal 9) in stage {loading_stage} of loading, most likely because "
            f"the container ran out of memory: raise its memory limit, or lower --max-num-batched-tokens and "
            f"--max-num-seqs (with their caps), --max-model-len, or use --dtype bfloat16 or a smaller model"
        )
    if code == -signal.SIGKILL:
        return (
            f"{name} ended unexpectedly (killed by signal 9): if nobody did so, memory ran out (the kernel's log says "
            f"so: dmesg, or OOMKilled in the pod's status); lower --gpu-memory-utilization or --device-memory-bytes, "
            f"or raise the container's limit"
        )
    if code == -signal.SIGBUS:
        return (
            f"{name} ended unexpectedly (killed by signal 7): most likely a file of the model was cut or written over "
            f"while it was served, or the disk that has it is gone; replace files by renaming others to their names"
        )
    cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{name} ended unexpectedly ({cause})"
