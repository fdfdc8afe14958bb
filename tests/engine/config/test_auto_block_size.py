"""The block size that `auto` means."""

import pytest
from trimtab_engine.config.auto_block_size import auto_block_size


@pytest.mark.parametrize(
    ("max_model_len", "block_size"),
    [
        (1, 16),
        (256, 16),
        (257, 32),
        (512, 32),
        (2048, 128),
        (4000, 256),
        (4096, 256),
        (8192, 256),
        (8193, 16),
        (131072, 16),
    ],
)
def test_about_sixteen_blocks_per_sequence_and_small_ones_for_long_contexts(
    max_model_len: int, block_size: int
) -> None:
    assert auto_block_size(max_model_len) == block_size


def test_block_tables_of_many_sequences_stay_small() -> None:
    for max_num_seqs in (1, 64, 256, 1024):
        size = auto_block_size(131072, max_num_seqs=max_num_seqs)
        assert -(-131072 // size) * max_num_seqs * 4 <= 1 << 19
