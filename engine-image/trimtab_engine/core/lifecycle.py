"""Pause and sleep, with vLLM's names.

A pause ends requests (abort), lets them finish (wait) or freezes them (keep). Sleep is a pause that releases memory:
level 0 nothing, level 1 the KV cache, level 2 the weights as well. A frozen request keeps its tokens and is recomputed
after wake-up, so its output does not change. The engine checks is_frozen before each step.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from trimtab_engine.device.kv_cache import KVCache
from trimtab_engine.errors import TrimtabError
from trimtab_engine.messages.admin import PauseMode
from trimtab_engine.runner.weights import Weights, WeightsUnavailable
from trimtab_engine.scheduling.scheduler import Scheduler


class LifecycleRejected(TrimtabError):
    """This cannot be done now, in the state that the engine is in. HTTP 409."""


@dataclass(slots=True)
class Lifecycle:
    """Pause and sleep state. `is_idle`: no request is left; `abort_all` ends every request; `drain_in_flight` completes
    steps in flight.
    """

    scheduler: Scheduler
    kv_cache: KVCache
    weights: Weights
    is_idle: Callable[[], bool]
    abort_all: Callable[[], None]
    drain_in_flight: Callable[[], None]
    clock: Callable[[], float]
    pause_mode: PauseMode | None = None
    """None if not paused and no pause is pending."""
    sleep_level: int | None = None
    """None if awake. Level 0 has released nothing."""
    has_weights: bool = True
    has_kv_cache: bool = True
    _falls_asleep: int | None = None
    """The sleep level to enter once running requests have finished."""

    @property
    def accepts(self) -> bool:
        """True if new requests are queued."""
        return self.pause_mode in (None, "keep")

    @property
    def is_frozen(self) -> bool:
        """True if no step runs. While `wait` lets requests finish, steps run."""
        return self.pause_mode is not None and not self._is_finishing

    @property
    def _is_finishing(self) -> bool:
        return self.pause_mode == "wait" and not self.is_idle()

    # --- calls -----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop working. Raises LifecycleRejected while asleep."""
        if self.sleep_level is not None:
            raise LifecycleRejected(f"the engine sleeps at level {self.sleep_level}: wake it up first")
        self.drain_in_flight()
        self.pause_mode = mode
        self._falls_asleep = None  # a later pause replaces a sleep that still waits for running requests
        if mode == "abort":
            self.abort_all()

    def resume(self) -> None:
        """Resume the engine.

        Raises:
            LifecycleRejected: While asleep.
        """
        if self.sleep_level is not None:
            raise LifecycleRejected(f"the engine sleeps at level {self.sleep_level}: wake it up, which resumes it too")
        self.pause_mode = self._falls_asleep = None

    def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, then release memory: immediately, or in mode wait after running requests have finished. The level can
        only increase.

        Raises:
            LifecycleRejected: If the current state does not allow it.
        """
        if self.sleep_level is not None and level < self.sleep_level:
            raise LifecycleRejected(
                f"the engine sleeps at level {self.sleep_level}: wake it up before it sleeps at {level}"
            )
        if level == 2 and not self.weights.can_drop_weights:
            raise LifecycleRejected(
                "level 2 is not supported for data-parallel cores of a mixture of experts, which step together; use "
                "level 1"
            )
        if self.sleep_level is None:
            self.pause(mode)
        self._falls_asleep = level
        self.on_step_end()

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore the parts named by the tags; restoring all of them resumes the engine.

        Raises:
            LifecycleRejected: If parts are restored in the wrong order.
        """
        if self.sleep_level is None and self._falls_asleep is None:
            raise LifecycleRejected("the engine is awake")
        self._falls_asleep = None
        if "weights" in tags and not self.has_weights:
            try:
                self.weights.reload_weights()
            except WeightsUnavailable as error:
                message = f"the weights cannot be loaded: {error}; the engine still sleeps: wake it up again"
                raise LifecycleRejected(message) from error
            self.has_weights = True
        if "kv_cache" in tags and not self.has_kv_cache:
            try:
                self.kv_cache.map_blocks(self.scheduler.num_blocks_total)
            except MemoryError as error:
                raise LifecycleRejected(
                    f"the device has no memory for {self.scheduler.num_blocks_total} KV blocks: {error}; free some, or "
                    f"lower gpu_memory_utilization, and wake it up again"
                ) from error
            self.has_kv_cache = True
        if "scheduling" not in tags:
            return
        if not (self.has_weights and self.has_kv_cache):
            missing = "weights" if not self.has_weights else "kv_cache"
            raise LifecycleRejected(f"{missing} must be woken before scheduling: leave the tags out to wake everything")
        self.sleep_level = self.pause_mode = None

    def on_step_end(self) -> None:
        """Enter a pending sleep if no request runs any more."""
        level = self._falls_asleep
        if level is None or self._is_finishing:
            return
        self._falls_asleep = None
        self.drain_in_flight()  # a step scheduled ahead may still run, for requests that have ended
        self.sleep_level = level
        if level >= 1 and self.has_kv_cache:
            self.scheduler.preempt_all(self.clock())
            self.scheduler.reset_prefix_cache()
            self.kv_cache.unmap_above(0)
            self.has_kv_cache = False
        if level >= 2 and self.has_weights:
            self.weights.drop_weights()
            self.has_weights = False

    # --- reports --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the state that answers every call. A pause or sleep is complete when `is_paused` or `is_sleeping` is
        true.
        """
        return {
            "is_paused": self.is_frozen,
            "pause_mode": self.pause_mode,
            "is_sleeping": self.sleep_level is not None,
            "sleep_level": self.sleep_level,
            "awake": {"weights": self.has_weights, "kv_cache": self.has_kv_cache},
            "remaining_requests": self.scheduler.num_unfinished,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """Work that a drain still waits for. Token counts are upper bounds: a request may end earlier."""

    num_running: int
    num_waiting: int
    output_tokens: int
    longest_output: int
    """Tokens that the longest running request may still generate."""
    prompt_tokens: int
    """Prompt tokens of the requests that wait."""

    def eta_seconds(self, tokens_per_second: float, prompt_seconds_per_token: float) -> float | None:
        """Return the time to finish at the current rate; None without a rate. Requests run concurrently, so the longest
        one counts as well as the sum: it gets its share of the rate.
        """
        if self.num_running + self.num_waiting == 0:
            return 0.0
        if not tokens_per_second:
            return None
        alone = self.longest_output * max(1, self.num_running) / tokens_per_second
        together = self.output_tokens / tokens_per_second
        return max(alone, together) + self.prompt_tokens * prompt_seconds_per_token
