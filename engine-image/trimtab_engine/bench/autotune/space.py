"""What is searched: settings of the three live knobs, and the grid of seats and budgets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.errors import ConfigError

MAX_STEPS_DOWN = 4  # halvings of the cap that are tried where no list is given: a sixteenth of it is the least
MIN_BUDGET = 64  # tokens; below, a step is all overhead on any device
HUNDREDTHS = 100  # gpu_memory_utilization is searched in hundredths, as the guide's script steps


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """Seats and token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return f"max_num_seqs {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}"


@dataclass(frozen=True, slots=True)
class Setting:
    """All three knobs, as they are PATCHed together."""

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
    """The grid, and the hundredths between which the utilisation is searched."""

    seats: tuple[int, ...]
    budgets: tuple[int, ...]
    utilization: tuple[int, int]

    def candidates(self) -> list[Candidate]:
        """Those that an engine takes: a budget has a token for every seat."""
        return [Candidate(s, b) for s in self.seats for b in self.budgets if b >= s]

    def largest(self) -> Candidate:
        """Most seats, then the largest budget."""
        return max(self.candidates())


def halvings(cap: int, least: int) -> tuple[int, ...]:
    """The cap and its halves, in rising order."""
    values = {max(cap >> step, min(least, cap)) for step in range(MAX_STEPS_DOWN + 1)}
    return tuple(sorted(values))


def space_of(
    *,
    seats: Sequence[int] | None,
    budgets: Sequence[int] | None,
    seats_cap: int,
    budget_cap: int,
    utilization: tuple[float, float],
) -> Space:
    """The lists that were given, or halvings of the caps. Raises ConfigError for what the engine cannot be set to."""
    _check_cap("--num-seqs-list", seats, seats_cap, "max-num-seqs-cap")
    _check_cap("--num-batched-tokens-list", budgets, budget_cap, "max-num-batched-tokens-cap")
    low, high = (round(value * HUNDREDTHS) for value in utilization)
    space = Space(
        tuple(sorted(set(seats))) if seats else halvings(seats_cap, 1),
        tuple(sorted(set(budgets))) if budgets else halvings(budget_cap, MIN_BUDGET),
        (min(low, high), high),
    )
    if not space.candidates():
        raise ConfigError(
            f"no budget is as large as {space.seats[0]} seats, the fewest of --num-seqs-list: a step has a token for "
            f"each; raise --num-batched-tokens-list (it ends at {space.budgets[-1]})"
        )
    return space


def _check_cap(flag: str, given: Sequence[int] | None, cap: int, cap_flag: str) -> None:
    if given and max(given) > cap:
        raise ConfigError(
            f"{flag} asks for {max(given)}, but the engine was started for {cap} at most; leave it out, or start the "
            f"engine with --{cap_flag} {max(given)}"
        )
