"""KV cache commands, executed on every rank: plain values that are sent in messages."""

import msgspec


class MapBlocks(msgspec.Struct, tag="map"):
    num_blocks: int


class UnmapAbove(msgspec.Struct, tag="unmap"):
    num_blocks: int


class CopyBlocks(msgspec.Struct, tag="copy"):
    pairs: list[tuple[int, int]]


class SwapBlocks(msgspec.Struct, tag="swap"):
    """Before the next step: copy blocks out (device, host), then in (host, device)."""

    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]


KvChange = MapBlocks | UnmapAbove | CopyBlocks
