"""The block size for `--block-size auto`: the rule that paged attention on TPUs uses for its pages.

```
max_model_len > 8192:  16                                            long contexts: small blocks waste least
otherwise:             next_power_of_2(max_model_len) // 16, 16..256 about 16 blocks per sequence
```
and large enough that the block tables of all sequences fit into SCALAR_TABLE_BYTES. Imports nothing, so that the
command line can use it.
"""

LONG_CONTEXT_TOKENS = 8192
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 256
BLOCKS_PER_SEQUENCE = 16
SCALAR_TABLE_BYTES = 1 << 19
"""Half of the 1 MiB of scalar memory where TPUs keep block tables, of 4-byte entries."""
TABLE_ENTRY_BYTES = 4


def auto_block_size(max_model_len: int, *, max_num_seqs: int = 1) -> int:
    """Return the tokens of a block, a power of two in 16..256 unless the block tables need larger blocks."""
    if max_model_len > LONG_CONTEXT_TOKENS:
        wanted = MIN_BLOCK_SIZE
    else:
        per_sequence = _power_of_2(max_model_len) // BLOCKS_PER_SEQUENCE
        wanted = min(MAX_BLOCK_SIZE, max(MIN_BLOCK_SIZE, per_sequence))
    entries_per_sequence = max(1, SCALAR_TABLE_BYTES // max_num_seqs // TABLE_ENTRY_BYTES)
    return max(wanted, _power_of_2(-(-max_model_len // entries_per_sequence)))


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below."""
    return 1 << (number - 1).bit_length()
