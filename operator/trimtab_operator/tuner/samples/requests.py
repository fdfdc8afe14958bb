"""Parser of `GET /admin/v1/requests`. Ages become times of the operator's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_operator.tuner.samples.sample import Finished, RequestUpdates, Unfinished
from trimtab_operator.tuner.samples.series import Unreadable

MAX_ROWS = 100_000  # more rows are not from a Trimtab engine
MAX_TOKENS = 1 << 31


def parse_request_updates(body: Mapping[str, Any], *, at: float) -> tuple[RequestUpdates, int]:
    """Parse one response received at `at`. Return the updates, and the number to request after next time.

    Columns are found by name, so that a newer engine may send more. Raise Unreadable.
    """
    try:
        columns = body["columns"]
        finished = _rows(body["finished"], columns["finished"])
        unfinished = _rows(body["unfinished"], columns["unfinished"])
        updates = RequestUpdates(
            finished=tuple(_finished(row, at) for row in finished),
            unfinished=tuple(_unfinished(row, at) for row in unfinished),
            missed=_count(body["missed"]),
        )
        return updates, _count(body["next"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Unreadable(f"the request list is invalid: {error}") from error


def _rows(rows: Any, names: Any) -> list[Mapping[str, Any]]:
    if not isinstance(rows, Sequence) or isinstance(rows, str) or len(rows) > MAX_ROWS:
        raise ValueError("rows are not a list, or too many")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _finished(row: Mapping[str, Any], at: float) -> Finished:
    arrived = at - _seconds(row["age_seconds"])
    return Finished(
        arrived_at=arrived,
        finished_at=arrived + _seconds(row["e2e_seconds"]),
        prompt_tokens=_count(row["prompt_tokens"]),
        output_tokens=_count(row["output_tokens"]),
        ttft_seconds=_optional_seconds(row["ttft_seconds"]),
        decode_seconds=_optional_seconds(row["decode_seconds"]),
        cached_tokens=_count(row["cached_tokens"]),
        preemptions=_count(row["preemptions"]),
        reason=str(row["reason"])[:20],
    )


def _unfinished(row: Mapping[str, Any], at: float) -> Unfinished:
    return Unfinished(
        arrived_at=at - _seconds(row["age_seconds"]),
        prompt_tokens=_count(row["prompt_tokens"]),
        output_tokens=_count(row["output_tokens"]),
        cached_tokens=_count(row["cached_tokens"]),
    )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKENS:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _optional_seconds(value: Any) -> float | None:
    return None if value is None else _seconds(value)
