"""Checks of requests that the device could not compute. Pure.

API servers check the same with better messages; the engine relies on these: an index beyond a table would crash the
step for all requests, or read zeros silently if the table is split among ranks.
"""

from collections.abc import Collection

from trimtab_engine.config.pooling import Tasks
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import check_spans
from trimtab_engine.multimodal.positions import RopePositions


def check_token_ids(message: AddRequest, vocab_size: int) -> None:
    """Raise InvalidRequest unless every token id that the device will index with is one of the vocabulary's."""
    sampling = message.sampling
    highest_allowed = int.from_bytes(sampling.allowed_tokens, "little").bit_length() - 1
    named: tuple[tuple[str, Collection[int]], ...] = (
        ("the prompt", message.prompt_token_ids),
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", (highest_allowed,) if sampling.allowed_tokens else ()),
    )
    for name, token_ids in named:
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"{name} has token id {token_id}, out of a vocabulary of {vocab_size} tokens")


def check_items(message: AddRequest, vision: VisionConfig | None) -> None:
    """Raise InvalidRequest unless the vision encoder can compute each image and video. None means there
    is no encoder.
    """
    if not message.spans:
        return
    if vision is None:
        kinds = sorted({span.item.modality for span in message.spans})
        raise InvalidRequest(
            f"the prompt has {' and '.join(kinds)} input, which this engine does not compute; send text"
        )
    check_spans(message.spans, len(message.prompt_token_ids))
    for number, span in enumerate(message.spans):
        item = span.item
        which = f"multi-modal item {number} ({item.modality})"
        if item.patches is None or item.patches.row_size != vision.row_size:
            brought = "none" if item.patches is None else f"patches of {item.patches.row_size} values"
            raise InvalidRequest(f"{which} brings {brought}; the tower reads patches of {vision.row_size}")
        if item.num_tokens != vision.num_tokens(item.grid):
            raise InvalidRequest(
                f"{which} has {item.num_tokens} tokens over a grid of {item.grid}; the vision encoder makes "
                f"{_describe_items(vision)}"
            )


def check_task(message: AddRequest, tasks: Tasks) -> None:
    """Raise InvalidRequest for an unsupported task or pooling dimension."""
    if message.pooling is None:
        if tasks.no_generation:
            raise InvalidRequest(f"no tokens are generated: {tasks.no_generation}")
        return
    if tasks.no_pooling:
        raise InvalidRequest(f"no vectors are given: {tasks.no_pooling}")
    dimensions, most = message.pooling.dimensions, tasks.pooler.hidden_size
    if dimensions is not None and not 1 <= dimensions <= most:
        raise InvalidRequest(f"dimensions is {dimensions}; the model has {most}")


def _describe_items(vision: VisionConfig) -> str:
    """Return a description of supported items for error messages."""
    if vision.fixed_resolution is not None:
        return f"{vision.fixed_resolution.num_tokens} tokens of each square"
    return f"a token of {vision.merge_size} x {vision.merge_size} patches"


def rope_of(message: AddRequest, vision: VisionConfig | None) -> RopePositions | None:
    """Return the token positions over time, height and width of a prompt with images. None for text-only prompts and
    for models with one position per token.
    """
    if vision is None or vision.windows is None or not message.spans:
        return None
    return RopePositions.of(
        message.spans,
        len(message.prompt_token_ids),
        merge_size=vision.merge_size,
        tokens_per_second=vision.windows.tokens_per_second,
    )
