"""Division of layers, heads and columns among ranks. Pure. Errors name numbers that do not divide."""

from trimtab_modelspec.errors import ConfigError

Span = tuple[int, int]
"""[first, last)."""


def layers_of_stages(num_layers: int, num_stages: int, override: tuple[int, ...] | None = None) -> tuple[Span, ...]:
    """Return the layers of each pipeline stage.

    Each stage gets num_layers // num_stages. The remainder goes to the stages before the last, from the back: the last
    also has the lm_head, the first the embeddings (it gets one more only if all others but the last have). `override`
    sets the number of layers per stage.

    Raises:
        ConfigError: If the numbers do not fit.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {num_stages}, but the model has {num_layers} layers; set {num_layers} or less"
        )
    counts = list(override) if override is not None else _even_counts(num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"--pipeline-layer-partition {','.join(map(str, counts))} must name {num_stages} stages of 1 layer or more "
            f"that sum to {num_layers}"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    return tuple((end - count, end) for end, count in zip(ends, counts, strict=True))


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    each, remainder = divmod(num_layers, num_stages)
    return [each + (1 if num_stages - 1 - remainder <= stage < num_stages - 1 else 0) for stage in range(num_stages)]


def equal_span(total: int, parts: int, index: int, what: str) -> Span:
    """Return the index-th of equal parts. Raises ConfigError, naming `what` is divided, when they would
    not be equal.
    """
    if total % parts:
        divisors = ", ".join(str(n) for n in range(1, parts + 1) if total % n == 0)
        raise ConfigError(f"{what} {total} cannot be divided by {parts}; divisors up to {parts}: {divisors}")
    each = total // parts
    return index * each, (index + 1) * each


def kv_head_span(num_kv_heads: int, tensor: int, index: int) -> Span:
    """KV heads are divided, or each is held by several ranks when there are fewer than ranks."""
    if num_kv_heads >= tensor:
        return equal_span(num_kv_heads, tensor, index, "--tensor-parallel-size: num_key_value_heads")
    if tensor % num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size is {tensor}, no multiple of num_key_value_heads {num_kv_heads}, so the heads "
            f"cannot be replicated evenly; set a multiple or a divisor of {num_kv_heads}"
        )
    head = index * num_kv_heads // tensor
    return head, head + 1


def vocabulary_span(vocab_size: int, tensor: int, index: int) -> Span:
    """Return rows of the embedding. Every part but the last has the same size; the last may be shorter."""
    each = -(-vocab_size // tensor)
    return min(index * each, vocab_size), min((index + 1) * each, vocab_size)
