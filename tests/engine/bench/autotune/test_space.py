"""The grid of candidates."""

import pytest
from trimtab_engine.bench.autotune.space import Candidate, Space, space_of
from trimtab_engine.errors import ConfigError


def a_space(seats: list[int] | None = None, budgets: list[int] | None = None) -> Space:
    return space_of(seats=seats, budgets=budgets, seats_cap=64, budget_cap=1024, utilization=(0.9, 0.98))


def test_without_lists_the_caps_are_halved() -> None:
    space = a_space()
    assert space.seats == (4, 8, 16, 32, 64)
    assert space.budgets == (64, 128, 256, 512, 1024)
    assert space.utilization == (90, 98)


def test_a_budget_has_a_token_for_every_seat() -> None:
    assert a_space([8, 64], [32, 128]).candidates() == [Candidate(8, 32), Candidate(8, 128), Candidate(64, 128)]


@pytest.mark.parametrize(
    ("seats", "budgets", "words"),
    [
        ([128], None, "--num-seqs-list asks for 128.*64 at most.*--max-num-seqs-cap 128"),
        (None, [4096], "--num-batched-tokens-list asks for 4096.*--max-num-batched-tokens-cap 4096"),
        ([64], [32], "no budget is as large as 64 seats"),
    ],
)
def test_what_the_engine_cannot_be_set_to_is_refused(
    seats: list[int] | None, budgets: list[int] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        a_space(seats, budgets)
