"""The device and its memory: what it holds, how the KV cache is mapped on it, copies and swaps beside the steps."""
