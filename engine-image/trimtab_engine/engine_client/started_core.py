"""Process of an engine core from its parent's view: start, cause of an unexpected end, orderly shutdown."""

import asyncio
import contextlib
import signal
from dataclasses import dataclass

import msgspec

from trimtab_engine.config.core_environment import core_environment
from trimtab_engine.engine_client.early_core import CORE_COMMAND as CORE_COMMAND
from trimtab_engine.engine_client.early_core import EarlyCore, take_early_core
from trimtab_engine.errors import EngineDead
from trimtab_engine.ipc.parent_death import environment_with_parent
from trimtab_engine.messages.lifecycle import CoreStart

SHUTDOWN_SECONDS = 5.0  # for the core to leave its loop before it is killed
DEAD_GRACE_SECONDS = 0.5  # for the core's last message with the cause to arrive after its exit


@dataclass(frozen=True, slots=True)
class StartedCore:
    """A started core. `index` is its data-parallel rank."""

    index: int
    process: asyncio.subprocess.Process | EarlyCore

    @classmethod
    async def start(cls, index: int, start: CoreStart) -> "StartedCore":
        """Start the process, or use the one that was started early.

        Raises:
            EngineDead: If it cannot be started.
        """
        line = msgspec.json.encode(start) + b"\n"
        early = take_early_core()
        if early is not None:
            early.send(line)
            return cls(index, early)
        try:
            process = await asyncio.create_subprocess_exec(
                *CORE_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                env=environment_with_parent(core_environment()),
                start_new_session=True,  # Ctrl-C is for the first process, which ends this one in order
            )
        except OSError as error:
            raise EngineDead(f"the engine core's process cannot be started: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already; waiting for its end reports that
            process.stdin.write(line)
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
    """Return an error message for a core that could not report its end. `loading_stage`: set if it was not ready yet.
    The kernel kills processes that exceed the container's memory limit.
    """
    if code == -signal.SIGKILL and loading_stage is not None:
        return (
            f"{name} was killed (signal 9) in stage {loading_stage} of loading, most likely because "
            f"the container ran out of memory: raise its memory limit, or lower --max-num-batched-tokens and "
            f"--max-num-seqs (with their caps), --max-model-len, or use --dtype bfloat16 or a smaller model"
        )
    if code == -signal.SIGKILL:
        return (
            f"{name} ended unexpectedly (killed by signal 9), most likely because memory ran out (the kernel's log has "
            f"the details: dmesg, or OOMKilled in the pod's status); lower --gpu-memory-utilization or "
            f"--device-memory-bytes, or raise the container's limit"
        )
    if code == -signal.SIGBUS:
        return (
            f"{name} ended unexpectedly (killed by signal 7): most likely a model file was truncated or overwritten "
            f"while it was in use, or its disk was removed; replace files by renaming new files over them"
        )
    cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{name} ended unexpectedly ({cause})"
