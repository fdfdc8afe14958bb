"""Search space: settings of the three live parameters, and the grid of max_num_seqs and budgets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.errors import ConfigError

MAX_STEPS_DOWN = 4  # halvings of the cap without a list: down to a sixteenth
MIN_BUDGET = 64  # tokens; smaller steps are dominated by overhead on any device
HUNDREDTHS = 100  # gpu_memory_utilization is searched in hundredths, as in vLLM's script


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """max_num_seqs and token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}"


@dataclass(frozen=True, slots=True)
class Setting:
    """All three parameters, which are PATCHed together."""

    candidate: Candidate
    gpu_memory_utilization: float

    @property
    def values(self) -> dict[str, float]:
        """Names of the admin API and their values."""
        return {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.candidate.max_num_seqs,
            "max_num_batched_tokens": self.candidate.max_num_batched_tokens,
        }


@dataclass(frozen=True, slots=True)
class Space:
    """The grid, and the range of utilization in hundredths."""

    num_seqs: tuple[int, ...]
    budgets: tuple[int, ...]
    utilization: tuple[int, int]

    def candidates(self) -> list[Candidate]:
        """Return the candidates that an engine accepts: a budget has at least one token per sequence."""
        return [Candidate(s, b) for s in self.num_seqs for b in self.budgets if b >= s]

    def largest(self) -> Candidate:
        """Return the candidate with most sequences, then the largest budget."""
        return max(self.candidates())


def halvings(cap: int, least: int) -> tuple[int, ...]:
    """Return the cap and its halves, in increasing order."""
    values = {max(cap >> step, min(least, cap)) for step in range(MAX_STEPS_DOWN + 1)}
    return tuple(sorted(values))


def build_space(
    *,
    num_seqs: Sequence[int] | None,
    budgets: Sequence[int] | None,
    num_seqs_cap: int,
    budget_cap: int,
    utilization: tuple[float, float],
) -> Space:
    """Return the space of the given lists, or of halvings of the caps. Raises ConfigError for values above the engine's
    caps.
    """
    _check_cap("--num-seqs-list", num_seqs, num_seqs_cap, "max-num-seqs-cap")
    _check_cap("--num-batched-tokens-list", budgets, budget_cap, "max-num-batched-tokens-cap")
    low, high = (round(value * HUNDREDTHS) for value in utilization)
    space = Space(
        tuple(sorted(set(num_seqs))) if num_seqs else halvings(num_seqs_cap, 1),
        tuple(sorted(set(budgets))) if budgets else halvings(budget_cap, MIN_BUDGET),
        (min(low, high), high),
    )
    if not space.candidates():
        raise ConfigError(
            f"no budget reaches {space.num_seqs[0]}, the smallest of --num-seqs-list; a step needs one token per "
            f"sequence; raise --num-batched-tokens-list (maximum {space.budgets[-1]})"
        )
    return space


def _check_cap(flag: str, given: Sequence[int] | None, cap: int, cap_flag: str) -> None:
    if given and max(given) > cap:
        raise ConfigError(
            f"{flag}: {max(given)} exceeds the engine's cap of {cap}; remove it, or start the engine with --{cap_flag} "
            f"{max(given)}"
        )
