"""The grid of candidates."""

import pytest
from trimtab_engine.bench.autotune.space import Candidate, Space, build_space
from trimtab_engine.errors import ConfigError


def make_space(num_seqs: list[int] | None = None, budgets: list[int] | None = None) -> Space:
    return build_space(num_seqs=num_seqs, budgets=budgets, num_seqs_cap=64, budget_cap=1024, utilization=(0.9, 0.98))


def test_default_lists_are_halvings_of_the_caps() -> None:
    space = make_space()
    assert space.num_seqs == (4, 8, 16, 32, 64)
    assert space.budgets == (64, 128, 256, 512, 1024)
    assert space.utilization == (90, 98)


def test_budget_has_a_token_per_sequence() -> None:
    assert make_space([8, 64], [32, 128]).candidates() == [Candidate(8, 32), Candidate(8, 128), Candidate(64, 128)]


@pytest.mark.parametrize(
    ("num_seqs", "budgets", "words"),
    [
        ([128], None, "--num-seqs-list: 128 exceeds.*cap of 64.*--max-num-seqs-cap 128"),
        (None, [4096], "--num-batched-tokens-list: 4096 exceeds.*--max-num-batched-tokens-cap 4096"),
        ([64], [32], "no budget reaches 64"),
    ],
)
def test_values_above_engine_caps_are_rejected(
    num_seqs: list[int] | None, budgets: list[int] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_space(num_seqs, budgets)
