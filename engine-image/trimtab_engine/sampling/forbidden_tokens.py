"""Tokens that a request may not choose in this step: end tokens below min_tokens, and tokens that would complete one of
its bad_words. Pure.

If only the device knows the newest token, a ban can be conditional on it.
"""

from collections.abc import Iterator

from trimtab_engine.sampling.rows import SampledRow

Ban = tuple[int, int | None]
"""(token, required newest token; None for an unconditional ban)."""


def bans_of(
    request: SampledRow, *, eos_token_ids: tuple[int, ...], vocab_size: int, has_unknown_token: bool = False
) -> Iterator[Ban]:
    """Return the bans for the token after the newest one. `has_unknown_token`: the request has one more token, known to
    the device only.
    """
    p = request.sampling
    if request.num_output_tokens + has_unknown_token < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)):
            if 0 <= token < vocab_size:
                yield token, None
    if not p.bad_words:
        return
    tokens, num_output = request.token_ids, request.num_output_tokens
    newest = tokens[-1] if num_output else None
    num_unknown = int(has_unknown_token)
    for word in p.bad_words:
        num_before = len(word) - 1 - num_unknown  # tokens that the host knows
        if num_before > 0 and word[num_before - 1] != newest:
            continue  # nearly all of them, at little cost
        if not 0 <= word[-1] < vocab_size:
            continue  # a tokenizer may know more tokens than the model has logits
        if num_before <= 0:
            yield word[-1], word[-2] if num_before == 0 and num_unknown else None
        elif num_before <= num_output and tuple(tokens[-num_before:]) == word[:num_before]:
            yield word[-1], word[-2] if num_unknown else None
