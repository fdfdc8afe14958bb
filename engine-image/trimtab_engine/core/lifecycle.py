"""Pausing and sleeping: an engine that could work and does not, and what it gives back meanwhile. vLLM's names.

A pause ends requests (abort), lets them finish (wait) or freezes them where they are (keep). Sleep is a pause that
gives memory back: level 0 nothing, level 1 the KV cache, level 2 the weights as well. A frozen request keeps its tokens
and is computed again after the wake-up, so it yields what it would have. The engine asks before each step whether to
work.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from trimtab_engine.device.kv_cache import KVCache
from trimtab_engine.errors import TrimtabError
from trimtab_engine.messages import PauseMode
from trimtab_engine.runner.weights import Weights
from trimtab_engine.scheduling.scheduler import Scheduler


class Refused(TrimtabError):
    """This cannot be done now, in the state that the engine is in. HTTP 409."""


@dataclass(slots=True)
class Lifecycle:
    """What the engine rests from. `is_idle`: no request is left; `abort_all` ends every one; `settle` lands the step in
    flight."""

    scheduler: Scheduler
    kv_cache: KVCache
    weights: Weights
    is_idle: Callable[[], bool]
    abort_all: Callable[[], None]
    settle: Callable[[], None]
    clock: Callable[[], float]
    pause_mode: PauseMode | None = None
    """None: it is not paused, and is not about to be."""
    sleep_level: int | None = None
    """None: it is awake. 0 has given nothing back."""
    has_weights: bool = True
    has_kv_cache: bool = True
    _falls_asleep: int | None = None
    """The level to go to once what runs has finished."""

    @property
    def accepts(self) -> bool:
        """Whether new requests are queued."""
        return self.pause_mode in (None, "keep")

    @property
    def is_frozen(self) -> bool:
        """Whether no step runs. While `wait` lets requests finish, steps do."""
        return self.pause_mode is not None and not self._is_finishing

    @property
    def _is_finishing(self) -> bool:
        return self.pause_mode == "wait" and not self.is_idle()

    # --- what is asked --------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop working. Raises Refused while asleep."""
        if self.sleep_level is not None:
            raise Refused(f"the engine sleeps at level {self.sleep_level}: wake it up first")
        self.settle()
        self.pause_mode = mode
        if mode == "abort":
            self.abort_all()

    def resume(self) -> None:
        """Work again. Raises Refused while asleep."""
        if self.sleep_level is not None:
            raise Refused(f"the engine sleeps at level {self.sleep_level}: wake it up, which resumes it too")
        self.pause_mode = self._falls_asleep = None

    def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, then give memory back: at once, or with mode wait when what runs has finished. From a level only to a
        deeper one. Raises Refused."""
        if self.sleep_level is not None and level < self.sleep_level:
            raise Refused(f"the engine sleeps at level {self.sleep_level}: wake it up before it sleeps at {level}")
        if level == 2 and not self.weights.can_drop_weights:
            raise Refused(
                "level 2 is not supported for data-parallel cores of a mixture of experts, which step together; use "
                "level 1"
            )
        if self.sleep_level is None:
            self.pause(mode)
        self._falls_asleep = level
        self.on_step_end()

    def wake_up(self, tags: Collection[str]) -> None:
        """Bring back what the tags name; all of it resumes the engine. Raises Refused where the order is wrong."""
        if self.sleep_level is None and self._falls_asleep is None:
            raise Refused("the engine is awake")
        self._falls_asleep = None
        if "weights" in tags and not self.has_weights:
            try:
                self.weights.reload_weights()
            except MemoryError as error:
                message = f"the device has no memory for the weights: {error}; free some, and wake it up again"
                raise Refused(message) from error
            self.has_weights = True
        if "kv_cache" in tags and not self.has_kv_cache:
            try:
                self.kv_cache.map_blocks(self.scheduler.num_blocks_total)
            except MemoryError as error:
                raise Refused(
                    f"the device has no memory for {self.scheduler.num_blocks_total} KV blocks: {error}; free some, or "
                    f"lower gpu_memory_utilization, and wake it up again"
                ) from error
            self.has_kv_cache = True
        if "scheduling" not in tags:
            return
        if not (self.has_weights and self.has_kv_cache):
            missing = "weights" if not self.has_weights else "kv_cache"
            raise Refused(f"{missing} must be woken before scheduling: leave the tags out to wake everything")
        self.sleep_level = self.pause_mode = None

    def on_step_end(self) -> None:
        """Fall asleep if that is due and nothing runs any more."""
        level = self._falls_asleep
        if level is None or self._is_finishing:
            return
        self._falls_asleep = None
        self.settle()  # a step scheduled ahead may still run, for requests that have ended
        self.sleep_level = level
        if level >= 1 and self.has_kv_cache:
            self.scheduler.preempt_all(self.clock())
            self.scheduler.reset_prefix_cache()
            self.kv_cache.unmap_above(0)
            self.has_kv_cache = False
        if level >= 2 and self.has_weights:
            self.weights.drop_weights()
            self.has_weights = False

    # --- what it tells --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The answer to every call. A pause or sleep has settled when `is_paused` or `is_sleeping` says so."""
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
    """What a drain still waits for. Tokens are at most: a request may end before."""

    num_running: int
    num_waiting: int
    output_tokens: int
    longest_output: int
    """Tokens that the longest running request may still generate."""
    prompt_tokens: int
    """Prompt tokens of the requests that wait."""

    def eta_seconds(self, tokens_per_second: float, prompt_seconds_per_token: float) -> float | None:
        """How long it takes at the present pace; None: there is none yet.

        Requests run side by side, so the longest one counts as well as the sum: it gets its share of the pace.
        """
        if self.num_running + self.num_waiting == 0:
            return 0.0
        if not tokens_per_second:
            return None
        alone = self.longest_output * max(1, self.num_running) / tokens_per_second
        together = self.output_tokens / tokens_per_second
        return max(alone, together) + self.prompt_tokens * prompt_seconds_per_token
