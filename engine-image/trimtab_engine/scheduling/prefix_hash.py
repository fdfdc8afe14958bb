"""Hash chain over full KV blocks, which lets requests with equal prefixes find each other's blocks.

The hash of block i covers all tokens up to its end: H(i) = sha256(H(i-1) + tokens of block i). The chain starts at a
root that depends on the request's salt and on the content of its adapter. Equal hashes therefore mean equal prefixes
under equal salts and adapters (vLLM V1's scheme with a different byte encoding). An adapter reloaded under the same
name with other weights does not find the old blocks.

Placeholders of two images are the same tokens. The content and start of each item that touches a block is therefore
hashed with its tokens.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

from trimtab_engine.multimodal.items import Span
from trimtab_engine.scheduling.adapter import Adapter

NONE_HASH = hashlib.sha256(b"trimtab-none-hash").digest()


@lru_cache(maxsize=1024)
def chain_root(cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """Return the value that precedes the hash of the first block. An adapter's root is 71 bytes with a prefix that no
    hash has, so neither tokens nor a salt, which are hashed after one, can equal it.
    """
    root = hashlib.sha256(NONE_HASH + cache_salt.encode()).digest() if cache_salt else NONE_HASH
    return root if adapter is None else hashlib.sha256(b"adapter" + adapter.digest + root).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: list[int],
    block_size: int,
    num_tokens: int,
    cache_salt: str,
    spans: Sequence[Span] = (),
    adapter: Adapter | None = None,
) -> None:
    """Append to `hashes` until they cover all full blocks of the first `num_tokens` tokens."""
    parent = hashes[-1] if hashes else chain_root(cache_salt, adapter)
    for start in range(len(hashes) * block_size, num_tokens - block_size + 1, block_size):
        end = start + block_size
        named = parent + array("I", token_ids[start:end]).tobytes()
        for span in spans:
            if span.offset < end and start < span.end:
                named += _name(span)
        parent = hashlib.sha256(named).digest()
        hashes.append(parent)


def _name(span: Span) -> bytes:
    """Return the bytes besides token ids that determine the keys and values of the span's tokens and the positions
    after it. Its length comes first, so that encodings are unambiguous.
    """
    item = span.item
    place = struct.pack("<q3qd", span.offset, *item.grid, item.seconds_per_step)
    named = b"item" + item.modality.encode() + b"\0" + place + item.content_hash
    return len(named).to_bytes(8, "little") + named
