"""Placement of an MoE model's experts on ranks. Pure tables."""

from typing import Literal

from trimtab_engine.errors import ConfigError

PlacementStrategy = Literal["linear", "round_robin"]


def place_experts(num_experts: int, num_ranks: int, placement: PlacementStrategy) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each rank of an expert-parallel group.

    linear: contiguous, the first ranks have one more if the number does not divide. round_robin: rank, rank + ranks, ….

    Raises:
        ConfigError: If a rank would have none.
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
    """Return each expert's index among `held`, or -1: the table that the kernel reads."""
    local = {expert: index for index, expert in enumerate(held)}
    return [local.get(expert, -1) for expert in range(num_experts)]
