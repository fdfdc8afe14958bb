"""What the device could not compute is refused at the core's door: the request ends there, alone, whichever route it
came by. Pure.

API servers check the same with better words. This is what the engine itself relies on: an index beyond a table would
end it for everybody, or read zeros in silence where the table is split among ranks.
"""

from collections.abc import Collection

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import AddRequest


def check_token_ids(message: AddRequest, vocab_size: int) -> None:
    """Raise InvalidRequest unless every token id that the device will index with is one of the vocabulary's."""
    sampling = message.sampling
    named: tuple[tuple[str, Collection[int]], ...] = (
        ("the prompt", message.prompt_token_ids),
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", sampling.allowed_token_ids),
    )
    for name, token_ids in named:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"{name} has token id {token_id}, out of a vocabulary of {vocab_size} tokens")


def check_items(message: AddRequest) -> None:
    """Raise InvalidRequest for images and videos: no tower is built that would compute them."""
    if message.spans:
        kinds = sorted({span.item.modality for span in message.spans})
        raise InvalidRequest(
            f"the prompt has {' and '.join(kinds)} input, which this engine does not compute; send text"
        )
