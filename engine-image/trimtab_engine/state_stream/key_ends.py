"""Ends of prefix keys in a prompt: from canonical bytes to places in the rendered text, and from there to tokens.

Canonical bytes are messages and tools as the client sent them; a chat template renders them in its own form. The
contents of messages are searched in the rendered text, in order. A key that ends within anything else (tools, roles,
tool calls, content that the template changes) ends where the next content begins: it then stands for more of the
prompt than it must, never for less. Keys after the last content that is found are dropped.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from trimtab_router.protocol.prefix_keys import CUT_BYTES, CanonicalPrompt

MAX_UNFOUND_CONTENTS = 16
"""Each content that is not found costs a search to the end of the text."""


def text_ends(prompt: CanonicalPrompt, text: bytes, num_keys: int) -> list[int]:
    """Return the byte position in the rendered text where each of the leading keys ends. Never decreasing; shorter than
    `num_keys` if the last keys end in text that is not found.
    """
    ends: list[int] = []
    contents = iter(prompt.contents)
    next_content = next(contents, None)
    offset = cursor = num_unfound = 0
    for place, piece in enumerate(prompt.pieces):
        if place == next_content:
            next_content = next(contents, None)
            begin, shown = _find(text, piece, cursor)
            if begin < 0:
                num_unfound += bool(shown)
                if num_unfound > MAX_UNFOUND_CONTENTS:
                    break
            else:
                cursor = begin + len(shown)
                skipped = offset + len(piece) - len(piece.lstrip()) if len(shown) < len(piece) else offset
                last = min((offset + len(piece)) // CUT_BYTES, num_keys)
                for end in range((len(ends) + 1) * CUT_BYTES, last * CUT_BYTES + 1, CUT_BYTES):
                    ends.append(begin + min(max(end - skipped, 0), len(shown)))
        offset += len(piece)
    return ends


def _find(text: bytes, content: bytes, cursor: int) -> tuple[int, bytes]:
    """Return where the content, or the content without blanks around it, is in the text; -1 if nowhere."""
    if content:
        begin = text.find(content, cursor)
        if begin >= 0:
            return begin, content
        content = content.strip()
        if content:
            return text.find(content, cursor), content
    return -1, content


def token_ends(ends: Sequence[int], token_bytes: Sequence[int]) -> list[int]:
    """Return how many tokens lie before each position.

    Args:
        ends: Byte positions in the text.
        token_bytes: Number of bytes of each token; their sum is the length of the text.
    """
    after = list(accumulate(token_bytes))
    return [bisect_right(after, end) for end in ends]


def align_token_bytes(token_bytes: list[int], num_bytes: int, *, begins_special: bool) -> bool:
    """Adjust the lengths of tokens to the length of their text. Return False if they do not fit.

    Args:
        token_bytes: Bytes of each token by itself.
        num_bytes: Length of the text.
        begins_special: True if the first token is special, and may have been added to the text's.
    """
    excess = sum(token_bytes) - num_bytes
    if begins_special and token_bytes and excess in (token_bytes[0], token_bytes[0] + 1):
        excess -= token_bytes[0]
        token_bytes[0] = 0
    if excess == 1:  # the blank that SentencePiece adds to the first word
        first = next((place for place, length in enumerate(token_bytes) if length), 0)
        token_bytes[first] -= 1
        excess = 0
    return excess == 0


def expanded_ends(ends: Sequence[int], placeholders: Sequence[int], expanded: Sequence[int]) -> list[int]:
    """Return the ends after placeholders of images and videos were replaced by several tokens each.

    Args:
        ends: Numbers of tokens before.
        placeholders: Position of each placeholder before.
        expanded: Position after the tokens of each placeholder, after.
    """
    if len(placeholders) != len(expanded):  # a model that adds tokens around an image: only text before is known
        return [end for end in ends if end <= min(placeholders, default=0)]
    shifted = []
    for end in ends:
        before = bisect_right(placeholders, end - 1)
        shifted.append(end + expanded[before - 1] - placeholders[before - 1] - 1 if before else end)
    return shifted
