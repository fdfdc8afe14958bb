"""The device and its memory: accounting, KV cache mapping, asynchronous copies and swaps."""
