"""Conversations of the offline LLM class: what the chat template writes of them, and the pictures that they bring."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_engine.errors import InvalidRequest

Message = Mapping[str, Any]
"""A role and a content: text, or a list of parts."""
PICTURES = {"image": "image", "image_pil": "image", "video": "video"}
"""Types of parts with pictures, under a key of the type's own name, and what they are (image_pil is vLLM's)."""


def split_pictures(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """The messages as templates take them, and their pictures by kind, in order: vLLM's multi_modal_data. Raises
    InvalidRequest for parts of other types."""
    pictures: dict[str, list[Any]] = {}
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            written.append(dict(message))
            continue
        written.append({**message, "content": [_part(part, pictures) for part in content]})
    return written, pictures


def _part(part: Any, pictures: dict[str, list[Any]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in PICTURES or kind not in part:
        raise InvalidRequest(
            f"content of type {str(kind)[:50]!r} is not taken here; give {{'type': 'text', 'text': …}}, "
            f"{{'type': 'image', 'image': a PIL image}} or {{'type': 'video', 'video': a list of them}}"
        )
    pictures.setdefault(PICTURES[kind], []).append(part[kind])
    return {"type": PICTURES[kind]}
