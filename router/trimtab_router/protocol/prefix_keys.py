"""Prefix keys: hashes of a prompt's beginnings that router and engine compute from the same request body.

A router has no tokenizer, and the engine's cache is indexed by tokens. Both sides therefore hash the request's text:
its canonical bytes are cut every 512 bytes, and key i is the XXH3-64 of cut i seeded with key i - 1. Equal keys mean
equal beginnings. The engine knows how many tokens each key covers and announces the keys whose KV blocks are cached
(docs/reference/contract.md section 8, ADR-0079). Keys only choose replicas: a collision costs a cache hit, never a
wrong token.

Canonical bytes: the bytes F6 to FF do not occur in UTF-8 and separate the fields.

    text prompt   its UTF-8
    token IDs     4 bytes each, little endian
    conversation  tools, then messages: FF tool as JSON … FE role [FD name] [FC reasoning] FB content [FA tool call ID]
                  (F9 function name F8 arguments F8 call ID) …; in content F7 separates text parts, and F6 precedes the
                  16-byte digest of an image or a video. Chat completions, Anthropic's messages (system, then the blocks
                  in their order) and OpenAI's responses (instructions, then the items in their order) are written alike

The seed of the first cut is the root: the hash of everything else that separates prompts (adapter, cache salt, special
tokens, template variables).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

KEY_RULE = 1
"""Version of this page's rules; keys of different versions are never compared."""
CUT_BYTES = 512
MAX_KEYS = 8192
"""Longer prompts have keys for their first 4 MiB only."""
SALT_CHARACTERS = 16

_TOOL, _ROLE, _NAME, _REASONING, _CONTENT = b"\xff", b"\xfe", b"\xfd", b"\xfc", b"\xfb"
_CALL_ID, _CALL, _ARGUMENT, _PART, _MEDIA = b"\xfa", b"\xf9", b"\xf8", b"\xf7", b"\xf6"
_MESSAGE_START = {role: _ROLE + role.encode() for role in ("system", "user", "assistant", "tool")}
_MESSAGE_START["developer"] = _MESSAGE_START["system"]  # the engine renders both alike
_PLAIN_START = {role: start + _CONTENT for role, start in _MESSAGE_START.items()}
_encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Prefix keys of one prompt, in order: key i identifies its first i + 1 cuts."""

    keys: tuple[int, ...]
    num_bytes: int
    """Canonical bytes of the whole prompt, for an estimate of its tokens."""
    num_tokens: int | None = None
    """Prompt length if the request has token IDs."""


@dataclass(frozen=True, slots=True)
class CanonicalPrompt:
    """Canonical bytes of one prompt in pieces."""

    root: int
    """Seed of the first cut."""
    pieces: Sequence[bytes]
    contents: Sequence[int]
    """Places in `pieces` of the texts that a chat template copies into the prompt: contents of messages."""
    num_tokens: int | None = None
    """Prompt length if the request has token IDs."""

    def keys(self) -> PromptKeys:
        """Return the keys of all full cuts."""
        data = b"".join(self.pieces)
        return PromptKeys(chain(self.root, data), len(data), self.num_tokens)


def prompt_keys(body: Mapping[str, Any], *, path: str = "", adapter: str = "", salt: str = "") -> list[PromptKeys]:
    """Return the keys of each prompt of a request that generates text; an empty list if the request has none.

    Args:
        body: The parsed JSON body. It may be invalid: the engine decides that.
        path: The request's path. It matters for bodies with `input`, which not only responses have.
        adapter: Name of the adapter, or an empty string for the base model under any of its names.
        salt: Salt of the client's API key (api_key_salt), where the engine separates API keys.
    """
    return [prompt.keys() for prompt in canonical_prompts(body, path=path, adapter=adapter, salt=salt)]


def canonical_prompts(
    body: Mapping[str, Any], *, path: str = "", adapter: str = "", salt: str = ""
) -> list[CanonicalPrompt]:
    """Return the canonical form of each prompt; arguments as for prompt_keys(). Never raises on invalid bodies."""
    if any(body.get(name) not in (None, "disabled") for name in ("truncate_prompt_tokens", "truncation")):
        return []  # the prompt may begin anywhere
    if body.get("previous_response_id") is not None:
        return []  # only the engine knows the beginning
    own_salt = body.get("cache_salt")
    salt += own_salt if isinstance(own_salt, str) else ""
    try:
        messages = body.get("messages")
        if isinstance(messages, list):
            return [_conversation(body, messages, adapter, salt)]
        if path.endswith("/responses"):
            given = body.get("input")
            items = [{"role": "user", "content": given}] if isinstance(given, str) else given
            return [_conversation(body, items, adapter, salt)] if isinstance(items, list) else []
        prompt = body.get("prompt")
        is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts: Any = prompt if is_list else [prompt]
        is_bare = body.get("add_special_tokens") is False
        return [_plain(each, adapter, salt, add_special_tokens=not is_bare) for each in prompts]
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, msgspec.MsgspecError, RecursionError):
        return []  # not a valid request


def chain(root: int, data: bytes) -> tuple[int, ...]:
    """Return the key of each full cut of `data`."""
    key, keys = root, []
    for start in range(0, min(len(data) - CUT_BYTES, CUT_BYTES * (MAX_KEYS - 1)) + 1, CUT_BYTES):
        key = xxh3_64_intdigest(data[start : start + CUT_BYTES], key)
        keys.append(key)
    return tuple(keys)


def api_key_salt(key: bytes) -> str:
    """Return the salt that separates clients by their API key, without revealing the key."""
    return hashlib.sha256(key).hexdigest()[:SALT_CHARACTERS] + ":"


def _root(kind: bytes, adapter: str, salt: str, *options: bytes) -> int:
    return xxh3_64_intdigest(b"\xff".join((b"trimtab", b"%d" % KEY_RULE, kind, _utf8(adapter), _utf8(salt), *options)))


def _plain(prompt: str | list[int], adapter: str, salt: str, *, add_special_tokens: bool) -> CanonicalPrompt:
    if isinstance(prompt, str):
        options = b"" if add_special_tokens else b"bare"
        return CanonicalPrompt(_root(b"text", adapter, salt, options), (_utf8(prompt),), (0,))
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    return CanonicalPrompt(_root(b"ids", adapter, salt), (ids.tobytes(),), (), len(ids))


def _conversation(body: Mapping[str, Any], messages: list[Any], adapter: str, salt: str) -> CanonicalPrompt:
    thinking, reasoning = body.get("thinking"), body.get("reasoning")
    variables = body.get("chat_template_kwargs") or None
    if isinstance(thinking, dict):
        variables = {"enable_thinking": thinking.get("type") != "disabled"}
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else body.get("reasoning_effort")
    special = b"special" if body.get("add_special_tokens") is True else b""
    root = _root(b"chat", adapter, salt, special, _encode_json(variables), _encode_json(effort))
    pieces: list[bytes] = []
    contents: list[int] = []
    for tool in body.get("tools") or ():
        pieces.append(_TOOL + _encode_json(tool))
    system = body.get("system") or body.get("instructions")
    if system:
        _append_message({"role": "system", "content": system}, pieces, contents)
    append = pieces.append
    for message in messages:
        if len(message) == 2:  # nearly always: role and text
            start, content = _PLAIN_START.get(message.get("role")), message.get("content")
            if start is not None and isinstance(content, str):
                append(start)
                contents.append(len(pieces))
                append(_utf8(content))
                continue
        _append_message(message, pieces, contents)
    return CanonicalPrompt(root, pieces, contents)


def _append_message(message: Mapping[str, Any], pieces: list[bytes], contents: list[int]) -> None:
    """Append a message, or an item of a response's input."""
    append = pieces.append
    kind = message.get("type", "message")
    if kind == "reasoning":
        parts = message.get("content") or message.get("summary") or ()
        append(_MESSAGE_START["assistant"] + _REASONING + _utf8("".join([part["text"] for part in parts])))
        return
    if kind == "function_call":
        append(_MESSAGE_START["assistant"] + _call(message["name"], message["arguments"], message["call_id"]))
        return
    if kind == "function_call_output":
        message = {"role": "tool", "content": message["output"], "tool_call_id": message["call_id"]}
    role, content = message["role"], message.get("content")
    append(_MESSAGE_START.get(role) or _ROLE + _utf8(role))
    has_more = len(message) > 2
    if has_more:
        if name := message.get("name"):
            append(_NAME + _utf8(name))
        if reasoning := message.get("reasoning") or message.get("reasoning_content"):
            append(_REASONING + _utf8(reasoning))
    append(_CONTENT)
    if isinstance(content, str):
        contents.append(len(pieces))
        append(_utf8(content))
    elif content:
        _append_parts(content, pieces, contents)
    if has_more:
        if call_id := message.get("tool_call_id"):
            append(_CALL_ID + _utf8(call_id))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            append(_call(function["name"], function.get("arguments") or "", call.get("id") or ""))


def _append_parts(parts: list[Any], pieces: list[bytes], contents: list[int]) -> None:
    """Append the text parts, digests of images and videos, and Anthropic's blocks about tools and thinking."""
    for place, part in enumerate(parts):
        kind = part["type"]
        if place:
            pieces.append(_PART)
        if "text" in part:
            contents.append(len(pieces))
            pieces.append(_utf8(part["text"]))
        elif kind == "tool_use":
            pieces.append(_call(part["name"], _encode_json(part["input"]).decode(), part["id"]))
        elif kind == "tool_result":
            pieces.append(_CALL_ID + _utf8(part["tool_use_id"]))
            result = part.get("content")
            if isinstance(result, str):
                contents.append(len(pieces))
                pieces.append(_utf8(result))
            elif result:
                _append_parts(result, pieces, contents)
        elif kind == "thinking":
            pieces.append(_REASONING + _utf8(part["thinking"]))
        else:
            pieces.append(_MEDIA + xxh3_128_digest(_media_identity(kind, part)))


def _media_identity(kind: str, part: Mapping[str, Any]) -> bytes:
    """Return the URL of an image or a video, or else the part itself."""
    where = part.get(kind) or part.get("image_url")
    url = where.get("url") if isinstance(where, dict) else where
    return _utf8(url) if url else _encode_json(part)


def _call(name: str, arguments: str, call_id: str) -> bytes:
    return _CALL + _ARGUMENT.join((_utf8(name), _utf8(arguments), _utf8(call_id)))


def _utf8(text: str) -> bytes:
    """Return UTF-8, with lone surrogates, which JSON allows, replaced as the engine replaces them."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
