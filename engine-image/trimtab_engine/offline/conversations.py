"""Conversations of the offline LLM class: messages for the chat template, and their images."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_engine.errors import InvalidRequest

Message = Mapping[str, Any]
"""A role and a content: text, or a list of parts."""
MEDIA_TYPES = {"image": "image", "image_pil": "image", "video": "video"}
"""Types of media parts, whose key has the type's name, and their modality (image_pil is vLLM's)."""


def split_media(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Return the messages for templates, and their media by modality, in order (vLLM's multi_modal_data). Raises
    InvalidRequest for other part types.
    """
    pictures: dict[str, list[Any]] = {}
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            written.append(dict(message))
            continue
        written.append({**message, "content": [_convert_part(part, pictures) for part in content]})
    return written, pictures


def _convert_part(part: Any, pictures: dict[str, list[Any]]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in MEDIA_TYPES or kind not in part:
        raise InvalidRequest(
            f"content of type {str(kind)[:50]!r} is not supported; use {{'type': 'text', 'text': …}}, "
            f"{{'type': 'image', 'image': a PIL image}} or {{'type': 'video', 'video': a list of them}}"
        )
    pictures.setdefault(MEDIA_TYPES[kind], []).append(part[kind])
    return {"type": MEDIA_TYPES[kind]}
