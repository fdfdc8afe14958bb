"""Tokens that a request may not choose just now: those that would end it below min_tokens, and those that would
complete one of its bad_words. Pure.

The newest token may be known to the device alone: then a ban may ask which token that is.
"""

from collections.abc import Iterator

from trimtab_engine.sampling.rows import SampledRow

Ban = tuple[int, int | None]
"""(token, what the newest token must be for it; None: whatever that is)."""


def bans_of(
    request: SampledRow, *, eos_token_ids: tuple[int, ...], vocab_size: int, has_unknown_token: bool = False
) -> Iterator[Ban]:
    """For the choice behind its newest token. `has_unknown_token`: there is one more than the request's own."""
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
