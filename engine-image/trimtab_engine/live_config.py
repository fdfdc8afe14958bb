"""The live configuration: what PATCH /admin/v1/config accepts, refuses and answers (docs/contract.md section 2).

Pure: a LiveConfig is a value and patch() gives the next one with the HTTP status and body. Applying it between two
steps, and everything HTTP, are the caller's.

Rules are judged on the merged result: what is in force, overlaid with everything that the PATCH sets. `min` and `max`
that are reported take the rest of it as given.
"""

import difflib
import math
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

FieldClass = Literal["live", "drain", "restart"]
Number = int | float
Json = dict[str, object]

ALIASES = {"max_num_active_seqs": "max_num_seqs"}
INTEGER_FIELDS = ("max_num_seqs", "max_num_batched_tokens")
UTILIZATION = "gpu_memory_utilization"
LARGEST_NUMBER = 1 << 53  # beyond it JSON numbers are not exact and no bound lies
MAX_ECHO_CHARACTERS = 100  # of a refused value in an answer: enough to recognise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What start-up fixed. Live values move inside it; to change it the engine must start again."""

    max_num_seqs_cap: int
    max_num_batched_tokens_cap: int
    gpu_memory_utilization_cap: str
    max_model_len: int
    block_size: int
    enable_chunked_prefill: bool
    min_utilization: str | None
    """What one request of max_model_len needs (memory.py), as a decimal. Asked for unless `kv_fixed_by` is set."""
    num_blocks_cap: int
    kv_fixed_by: str | None = None
    """The flag that fixes the KV cache and takes gpu_memory_utilization out of the live fields; None: nothing does."""
    restart_fields: tuple[tuple[str, object], ...] = ()
    """Further fields that only a restart changes, with their values, such as ("model", "/models/m")."""

    def to_json(self) -> Json:
        body: Json = {
            "max_num_seqs_cap": self.max_num_seqs_cap,
            "max_num_batched_tokens_cap": self.max_num_batched_tokens_cap,
            "gpu_memory_utilization_cap": float(self.gpu_memory_utilization_cap),
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "num_blocks_cap": self.num_blocks_cap,
            "kv_fixed_by": self.kv_fixed_by,
        }
        return body | dict(self.restart_fields)

    @property
    def restart_names(self) -> list[str]:
        """Every field that only a restart changes."""
        names = [name for name in self.to_json() if name not in ("num_blocks_cap", "kv_fixed_by")]
        return [*names, UTILIZATION] if self.kv_fixed_by else names


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValues:
    """The values in force. The utilisation is the decimal that was written, so that no binary rounding moves a byte."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field cannot have a value, and the nearest one that it could have."""

    field: str
    value: object
    message: str
    min: Number | None = None
    max: Number | None = None
    nearest: Number | None = None

    def to_json(self) -> Json:
        return {
            "field": self.field,
            "value": _echo(self.value),
            "min": self.min,
            "max": self.max,
            "nearest": self.nearest,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The configuration in force and how often it has changed: generation 1 is how the engine started."""

    envelope: Envelope
    values: LiveValues
    generation: int = 1

    def numbers(self) -> dict[str, Number]:
        """The live fields' values."""
        return _numbers(self.envelope, self.values)

    def describe(self) -> Json:
        """The body of GET /admin/v1/config. Changes are applied as they are accepted: desired equals applied."""
        fields: Json = {}
        for name in self.numbers():
            low, high = _bounds(self.envelope, self.values, name)
            fields[name] = {"class": "live", "min": low, "max": high}
        for alias, name in ALIASES.items():
            fields[alias] = fields[name]
        for name in self.envelope.restart_names:
            fields[name] = {"class": "restart", "min": None, "max": None}
        return {
            "generation": self.generation,
            "envelope": self.envelope.to_json(),
            "desired": self.numbers(),
            "applied": self.numbers(),
            "fields": fields,
        }

    def patch(
        self,
        values: object,
        *,
        if_match: int | None = None,
        dry_run: bool = False,
        change_id: str | None = None,
        applied_at_step: int | None = None,
    ) -> tuple["LiveConfig", int, Json]:
        """Judge one PATCH: the configuration from now on, the HTTP status and the body.

        `change_id` names the change and `applied_at_step` is the step that will first run under it; a dry run has
        neither. Unless the status is 200, and after a dry run, the configuration is this one, unchanged.
        """
        if not isinstance(values, dict) or any(isinstance(value, dict | list) for value in values.values()):
            message = 'the body must be a flat JSON object of fields and values, such as {"max_num_seqs": 64}'
            return self, 400, {"message": message}
        if if_match is not None and if_match != self.generation:
            message = f"If-Match is {if_match}, but the configuration is at generation {self.generation}; read it again"
            return self, 412, {"message": message, "generation": self.generation}
        merged = _merge(self.envelope, self.values, values)
        if isinstance(merged, Refusal):
            return self, 422, merged.to_json()
        changed = _numbers(self.envelope, merged) != self.numbers()
        after = LiveConfig(self.envelope, merged, self.generation + 1) if changed and not dry_run else self
        body: Json = {
            "id": None if dry_run else change_id,
            "generation": after.generation,
            "desired": _numbers(self.envelope, merged),
            "applied_at_step": None if dry_run else applied_at_step,
        }
        return after, 200, body


def _numbers(envelope: Envelope, values: LiveValues) -> dict[str, Number]:
    numbers: dict[str, Number] = {
        "max_num_seqs": values.max_num_seqs,
        "max_num_batched_tokens": values.max_num_batched_tokens,
    }
    if envelope.kv_fixed_by is None:
        numbers[UTILIZATION] = float(values.gpu_memory_utilization)
    return numbers


def _merge(envelope: Envelope, values: LiveValues, patch: dict[object, object]) -> LiveValues | Refusal:
    """What is in force overlaid with the patch, or why not. Types and classes first, then bounds in order of fields."""
    wanted: dict[str, tuple[str, Number]] = {}  # field: the name it was given under, its value
    for given, value in patch.items():
        given_name = str(given)
        name = ALIASES.get(given_name, given_name)
        number = _read(envelope, values, given_name, name, value)
        if isinstance(number, Refusal):
            return number
        if name in wanted and wanted[name][1] != number:
            other, earlier = wanted[name]
            return Refusal(
                given_name, value, f"{given_name} and {other} are one field, given as {number} and {earlier}"
            )
        wanted[name] = (given_name, number)
    merged = values
    for name, (_, number) in wanted.items():
        merged = _with(merged, name, number)
    # A value that is wrong by itself is named before one that is wrong beside others.
    for judge in (_own_bounds, _bounds):
        for name, (given_name, number) in wanted.items():
            low, high = judge(envelope, merged, name)
            if not low <= number <= high:
                return _outside(envelope, merged, name, given_name, number)
    return merged


def _read(envelope: Envelope, values: LiveValues, given: str, name: str, value: object) -> Number | Refusal:
    """The value as this field's type. bool is no number, text is not read as one, integers must be integral."""
    live = _numbers(envelope, values)
    if name not in live:
        return _not_live(envelope, list(live), given, value)
    low, high = _bounds(envelope, values, name)
    kind = "an integer" if name in INTEGER_FIELDS else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Refusal(given, value, f"{given} must be {kind}, not {_json_type(value)}", low, high)
    if isinstance(value, float) and not math.isfinite(value):
        return Refusal(given, value, f"{given} must be {kind}, not {value}", low, high)
    value = _clamp(value, -LARGEST_NUMBER, LARGEST_NUMBER)
    if name not in INTEGER_FIELDS:
        return value
    if value != int(value):
        nearest = _clamp(round(value), low, high)
        return Refusal(given, value, f"{given} must be an integer, not {value}", low, high, nearest)
    return int(value)


def _not_live(envelope: Envelope, live: list[str], given: str, value: object) -> Refusal:
    if given == UTILIZATION and envelope.kv_fixed_by:
        message = (
            f"{UTILIZATION} is of class restart here: {envelope.kv_fixed_by} fixes the KV cache; "
            f"start the engine without it to size the cache by utilisation"
        )
        return Refusal(given, value, message)
    if given in envelope.restart_names:
        return Refusal(given, value, f"{given} is of class restart: start the engine again to change it")
    close = difflib.get_close_matches(given[:MAX_ECHO_CHARACTERS], live, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"{_shorten(given)} is not a field of the configuration; live fields are {', '.join(live)}{hint}"
    return Refusal(_shorten(given), value, message)


def _with(values: LiveValues, name: str, number: Number) -> LiveValues:
    if name == "max_num_seqs":
        return replace(values, max_num_seqs=int(number))
    if name == "max_num_batched_tokens":
        return replace(values, max_num_batched_tokens=int(number))
    # repr gives back the decimal that was written: 0.29 stays 0.29
    return replace(values, gpu_memory_utilization=format(Decimal(repr(number)), "f"))


def _own_bounds(envelope: Envelope, values: LiveValues, name: str) -> tuple[Number, Number]:
    """Least and greatest value of the field whatever the others are."""
    if name == "max_num_seqs":
        return 1, envelope.max_num_seqs_cap
    if name == "max_num_batched_tokens":
        return (1 if envelope.enable_chunked_prefill else envelope.max_model_len), envelope.max_num_batched_tokens_cap
    assert envelope.min_utilization is not None  # else the engine could not have started
    return float(envelope.min_utilization), float(envelope.gpu_memory_utilization_cap)


def _bounds(envelope: Envelope, values: LiveValues, name: str) -> tuple[Number, Number]:
    """Least and greatest value of the field beside the other values: max_num_batched_tokens >= max_num_seqs."""
    low, high = _own_bounds(envelope, values, name)
    if name == "max_num_seqs":
        return low, min(high, values.max_num_batched_tokens)
    if name == "max_num_batched_tokens":
        return max(low, values.max_num_seqs), high
    return low, high


def _outside(envelope: Envelope, merged: LiveValues, name: str, given: str, number: Number) -> Refusal:
    """The refusal of a value outside its bounds beside the merged others, or outside its own when those contradict."""
    low, high = _bounds(envelope, merged, name)
    if low > high:
        low, high = _own_bounds(envelope, merged, name)
    message = f"{given} is {number}: {_reason(envelope, merged, name, number)}"
    return Refusal(given, number, message, low, high, _clamp(number, low, high))


def _reason(envelope: Envelope, merged: LiveValues, name: str, number: Number) -> str:
    """Which bound it breaks, and how that bound could be moved."""
    if name == "max_num_seqs":
        if number < 1:
            return "it must be 1 or more"
        if number > envelope.max_num_seqs_cap:
            return f"the cap is {envelope.max_num_seqs_cap} (--max-num-seqs-cap, fixed at start)"
        return f"it must not exceed max_num_batched_tokens, {merged.max_num_batched_tokens}; raise that as well"
    if name == "max_num_batched_tokens":
        if number > envelope.max_num_batched_tokens_cap:
            return f"the cap is {envelope.max_num_batched_tokens_cap} (--max-num-batched-tokens-cap, fixed at start)"
        if number < merged.max_num_seqs:
            return f"it must be at least max_num_seqs, {merged.max_num_seqs}; lower that as well"
        return f"without chunked prefill it must be at least max_model_len, {envelope.max_model_len}"
    if number > float(envelope.gpu_memory_utilization_cap):
        return f"the cap is {envelope.gpu_memory_utilization_cap} (--gpu-memory-utilization-cap, fixed at start)"
    return f"one request of max_model_len {envelope.max_model_len} needs {envelope.min_utilization} or more"


def _clamp(number: Number, low: Number, high: Number) -> Number:
    return max(low, min(high, number))


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return "a string" if isinstance(value, str) else type(value).__name__


def _echo(value: object) -> object:
    """The refused value in a form that JSON can carry, and short."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return "an integer beyond 2^53"
    return _shorten(value) if isinstance(value, str) else value


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARACTERS else text[:MAX_ECHO_CHARACTERS] + "..."
