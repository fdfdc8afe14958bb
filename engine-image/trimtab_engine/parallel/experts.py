"""Which rank holds which experts of a mixture: pure tables."""

from typing import Literal

from trimtab_engine.errors import ConfigError

PlacementStrategy = Literal["linear", "round_robin"]


def place_experts(num_experts: int, num_ranks: int, placement: PlacementStrategy) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank of an expert-parallel group.

    linear: contiguous, the first ranks holding one more when they do not divide. round_robin: rank, rank + ranks, ….
    Raises ConfigError when a rank would hold none.
    """
    if num_ranks > num_experts:
        raise ConfigError(
            f"--enable-expert-parallel spreads the experts over tensor x data parallel = {num_ranks} ranks, but the "
            f"model has {num_experts}; set a product of {num_experts} or less"
        )
    if placement == "round_robin":
        return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))
    each, remainder = divmod(num_experts, num_ranks)
    firsts = [rank * each + min(rank, remainder) for rank in range(num_ranks + 1)]
    return tuple(tuple(range(firsts[rank], firsts[rank + 1])) for rank in range(num_ranks))


def expert_map(num_experts: int, held: tuple[int, ...]) -> list[int]:
    """Per expert its index among those that are held, -1 for the others: the table that the kernel reads."""
    local = {expert: index for index, expert in enumerate(held)}
    return [local.get(expert, -1) for expert in range(num_experts)]
