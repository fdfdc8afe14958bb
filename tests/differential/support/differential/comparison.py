"""Comparison of two servers' answers to one request.

A difference is a line `PLACE: vLLM VALUE, Trimtab VALUE`. Values that always differ (ids, times, error sentences) are
compared by type only; log-probabilities within LOGPROB_TOLERANCE, because kernels sum in another order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from differential.requests_to_compare import ComparedRequest

LOGPROB_TOLERANCE = 2e-3
REQUEST_TIMEOUT_SECONDS = 120.0
BY_TYPE_ONLY = frozenset(
    {"id", "created", "message", "system_fingerprint", "root", "permission", "owned_by", "version", "service_tier"}
)
NUMBERS_BY_TOLERANCE = frozenset({"logprob", "token_logprobs", "top_logprobs", "prompt_logprobs"})
NOT_COMPARED = frozenset({"system_fingerprint", "prompt_tokens_details", "permission", "default_sampling_params"})
"""Fields that only one server has, by its flags or by design: docs/results/differential-vllm.md."""
JSON_TEXTS = frozenset({"arguments"})
"""Fields with JSON as text, where only the spacing may differ."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One server's response: status, content type, and its body or the events of its stream."""

    status: int
    media_type: str
    body: Any


async def ask(http: httpx.AsyncClient, base_url: str, request: ComparedRequest) -> Answer:
    """Send one request, and parse the response."""
    content = request.body if isinstance(request.body, bytes) else None
    reply = await http.request(
        request.method,
        base_url.rstrip("/") + request.path,
        content=content,
        json=None if content is not None or request.body is None else request.body,
        headers={"Content-Type": "application/json"} if content is not None else {},
        timeout=REQUEST_TIMEOUT_SECONDS,
    )
    media_type = reply.headers.get("content-type", "").split(";")[0]
    return Answer(reply.status_code, media_type, _parse_body(media_type, reply.text))


def _parse_body(media_type: str, text: str) -> Any:
    if media_type == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return _joined([line if line == "[DONE]" else json.loads(line) for line in lines])
    try:
        return json.loads(text)
    except ValueError:
        return text


def _joined(events: list[Any]) -> dict[str, Any]:
    """Return a stream as one value: the order of event kinds, each field once, and the texts of each choice joined.

    Servers may put several tokens into one event, so consecutive events of one kind count as one.
    """
    kinds: list[str] = []
    texts: dict[str, str] = {}
    shapes: set[str] = set()
    ends: dict[str, Any] = {}
    usage = None
    for event in events:
        kind = _kind_of(event)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        if not isinstance(event, dict):
            continue
        usage = event.get("usage") or usage
        shapes |= set(_paths({key: value for key, value in event.items() if value is not None}))
        for choice in event.get("choices") or ():
            index = str(choice["index"])
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            for call in (choice.get("delta") or {}).get("tool_calls") or ():
                function = call.get("function") or {}
                for part in ("name", "arguments"):
                    texts[f"{index}.{part}"] = texts.get(f"{index}.{part}", "") + (function.get(part) or "")
            if choice.get("finish_reason"):
                ends[index] = [choice["finish_reason"], choice.get("stop_reason")]
    return {"events": kinds, "texts": texts, "fields": sorted(shapes), "ends": ends, "usage": usage}


def _kind_of(event: Any) -> str:
    if not isinstance(event, dict):
        return str(event)
    if "error" in event:
        return "error"
    choices = event.get("choices") or ()
    if not choices:
        return "usage"
    delta = choices[0].get("delta")
    if delta is None:
        return "text"
    if delta.get("role") and not delta.get("content") and not delta.get("tool_calls"):
        return "role"
    return "tool" if delta.get("tool_calls") else "text"


def _paths(value: Any, place: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key in ("top_logprobs", "usage") or key in NOT_COMPARED or part is None:
                continue
            yield from _paths(part, f"{place}.{key}")
    elif isinstance(value, list):
        for part in value:
            yield from _paths(part, f"{place}[]")
    else:
        yield place


def differences(vllm: Answer, trimtab: Answer) -> list[str]:
    """Return every difference of two answers; empty if there is none."""
    found = list(_different("status", vllm.status, trimtab.status, ""))
    if vllm.status == trimtab.status:
        found += _different("media type", vllm.media_type, trimtab.media_type, "")
    if vllm.status != trimtab.status or vllm.status >= 400:
        return found  # sentences of errors differ; their status is what clients act on
    return [*found, *_different("", vllm.body, trimtab.body, "")]


def _different(place: str, one: Any, other: Any, field: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted((one.keys() | other.keys()) - NOT_COMPARED):
            where = f"{place}.{key}" if place else str(key)
            if key not in other:
                if one[key] is not None:
                    yield f"{where}: only vLLM ({_short(one[key])})"
            elif key not in one:
                if other[key] is not None:
                    yield f"{where}: only Trimtab ({_short(other[key])})"
            else:
                inner = field if field in NUMBERS_BY_TOLERANCE else str(key)
                yield from _different(where, one[key], other[key], inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _different(f"{place}[{index}]", left, right, field)
    elif not _is_same(one, other, field):
        yield f"{place}: vLLM {_short(one)}, Trimtab {_short(other)}"


def _is_same(one: Any, other: Any, field: str) -> bool:
    if field in BY_TYPE_ONLY and one is not None and other is not None:
        return type(one) is type(other)
    if field in NUMBERS_BY_TOLERANCE and isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= LOGPROB_TOLERANCE
    if field in JSON_TEXTS and isinstance(one, str) and isinstance(other, str):
        return re.sub(r"\s", "", one) == re.sub(r"\s", "", other)
    return bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
