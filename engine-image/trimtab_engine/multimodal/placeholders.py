"""Expansion of a prompt's placeholders: a chat template writes one token per image or video, and each becomes as many
tokens as the encoder output has rows. Pure.

```
written    5 81 [image] 12 [video] 7            written by the template, or folded
expanded   5 81 [image][image][image][image] 12 [video]…[video] 7
```
"""

from collections.abc import Mapping, Sequence

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Span


def expand(
    token_ids: Sequence[int], items: Sequence[MultiModalItem], placeholders: Mapping[Modality, int]
) -> tuple[list[int], tuple[Span, ...]]:
    """The prompt with room for all items, and where they are. Raises InvalidRequest unless the template has written a
    placeholder for each, in their order.
    """
    modality_of = {token_id: modality for modality, token_id in placeholders.items()}
    expanded: list[int] = []
    spans: list[Span] = []
    copied = 0
    for place, token_id in enumerate(token_ids):
        modality = modality_of.get(token_id)
        if modality is None:
            continue
        if len(spans) == len(items) or items[len(spans)].modality != modality:
            raise _mismatch(token_ids, items, modality_of)
        expanded += token_ids[copied:place]
        copied = place + 1
        item = items[len(spans)]
        spans.append(Span(len(expanded), item))
        expanded += [token_id] * item.num_tokens
    if len(spans) != len(items):
        raise _mismatch(token_ids, items, modality_of)
    expanded += token_ids[copied:]
    return expanded, tuple(spans)


def _mismatch(
    token_ids: Sequence[int], items: Sequence[MultiModalItem], modality_of: Mapping[int, Modality]
) -> InvalidRequest:
    written = [modality_of[token_id] for token_id in token_ids if token_id in modality_of]
    sent = [item.modality for item in items]
    return InvalidRequest(
        f"the prompt has places for {_counted(written)}, but brings {_counted(sent)}; a text must not hold the tokens "
        f"that stand for images and videos, and the chat template must write one for each, in order"
    )


def _counted(modalities: Sequence[Modality]) -> str:
    kinds = sorted(set(modalities))
    return (
        " and ".join(f"{modalities.count(kind)} {kind}{'s' * (modalities.count(kind) != 1)}" for kind in kinds)
        or "none"
    )


def fold(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """The expanded prompt with one placeholder per item, which is how it travels: a large image has thousands."""
    folded: list[int] = []
    copied = 0
    for span in spans:
        folded += token_ids[copied : span.offset + 1]
        copied = span.end
    folded += token_ids[copied:]
    return folded


def unfold(folded: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """Return the folded token ids.

    Raises:
        InvalidRequest: an item's placeholder is missing.
    """
    token_ids: list[int] = []
    copied = 0
    for span in spans:
        place = copied + span.offset - len(token_ids)
        if not copied <= place < len(folded):
            raise InvalidRequest(f"a multi-modal item starts at token {span.offset}, which is outside the prompt")
        token_ids += folded[copied:place]
        token_ids += [folded[place]] * span.item.num_tokens
        copied = place + 1
    token_ids += folded[copied:]
    return token_ids
