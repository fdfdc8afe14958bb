"""Names for the content of full KV blocks, so that equal beginnings of requests find each other's blocks.

The hash of block i covers all tokens up to its end: H(i) = sha256(H(i-1) + tokens of block i), and the chain starts at
a root that depends on the request's salt. So equal hashes mean equal prefixes under equal salts, and requests with
different salts share nothing (vLLM V1's scheme; the bytes that are hashed are our own).
"""

import hashlib
from array import array
from functools import lru_cache

NONE_HASH = hashlib.sha256(b"trimtab-none-hash").digest()


@lru_cache(maxsize=1024)
def chain_root(cache_salt: str) -> bytes:
    """What stands in for the hash before the first block."""
    return hashlib.sha256(NONE_HASH + cache_salt.encode()).digest() if cache_salt else NONE_HASH


def extend_block_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, num_tokens: int, cache_salt: str
) -> None:
    """Append to `hashes` until they cover all full blocks of the first `num_tokens` tokens."""
    parent = hashes[-1] if hashes else chain_root(cache_salt)
    for start in range(len(hashes) * block_size, num_tokens - block_size + 1, block_size):
        parent = hashlib.sha256(parent + array("I", token_ids[start : start + block_size]).tobytes()).digest()
        hashes.append(parent)
