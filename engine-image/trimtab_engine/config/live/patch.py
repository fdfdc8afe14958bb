"""The live configuration: validation and application of PATCH /admin/v1/config (docs/reference/contract.md section 2).

Pure: a LiveConfig is a value, and patch() returns the next one with HTTP status and body. The caller handles HTTP and
applies the value between two steps. fields.py lists the live fields. Rules are checked on the merged result: current
values overlaid with the PATCH. Reported `min` and `max` take the other values of the merged result as given.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_engine.config.live.fields import BY_NAME, FIELDS, Field
from trimtab_engine.config.live.reading import (
    MAX_ECHO_CHARACTERS,
    Bounds,
    FieldError,
    InvalidValue,
    Json,
    Number,
    Value,
    clamp,
    in_words,
    read,
    shorten,
)
from trimtab_engine.config.live.values import Envelope, LiveValues


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The configuration in force and how often it has changed: generation 1 is how the engine started."""

    envelope: Envelope
    values: LiveValues
    generation: int = 1

    def shown(self) -> dict[str, Value]:
        """Return the live fields' values as in responses."""
        return _shown(self.envelope, self.values)

    def numbers(self) -> dict[str, float]:
        """Return the fields that are numbers or switches (1 is on): the values of trimtab_config_value."""
        return {name: float(value) for name, value in self.shown().items() if not isinstance(value, str)}

    def texts(self) -> dict[str, str]:
        """Return the fields that are choices, as text."""
        return {name: value for name, value in self.shown().items() if isinstance(value, str)}

    def describe(self) -> Json:
        """Return the body of GET /admin/v1/config. Changes are applied as they are accepted: desired equals applied."""
        fields: Json = {}
        for field in _live_fields(self.envelope):
            for name in (field.name, *field.aliases):
                fields[name] = field.described(self.envelope, self.values)
        for name in self.envelope.restart_names:
            fields[name] = {"class": "restart", "min": None, "max": None}
        return {
            "generation": self.generation,
            "envelope": self.envelope.to_json(),
            "desired": self.shown(),
            "applied": self.shown(),
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
        if isinstance(merged, FieldError):
            return self, 422, merged.to_json()
        changed = _shown(self.envelope, merged) != self.shown()
        after = LiveConfig(self.envelope, merged, self.generation + 1) if changed and not dry_run else self
        body: Json = {
            "id": None if dry_run else change_id,
            "generation": after.generation,
            "desired": _shown(self.envelope, merged),
            "applied_at_step": None if dry_run else applied_at_step,
        }
        return after, 200, body


def _live_fields(envelope: Envelope) -> list[Field]:
    return [field for field in FIELDS if field.is_live(envelope)]


def _shown(envelope: Envelope, values: LiveValues) -> dict[str, Value]:
    return {field.name: field.shown(values) for field in _live_fields(envelope)}


@dataclass(frozen=True, slots=True)
class _FieldChange:
    """A field's value in a PATCH, and the field name used there."""

    field: Field
    given: str
    value: Value


def _merge(envelope: Envelope, values: LiveValues, patch: Mapping[object, object]) -> LiveValues | FieldError:
    """Return current values overlaid with the patch, or the error. Types and classes are checked first, then bounds in
    field order.
    """
    wishes: dict[str, _FieldChange] = {}
    for name, value in patch.items():
        change = _field_change(envelope, values, str(name), value)
        if isinstance(change, FieldError):
            return change
        earlier = wishes.get(change.field.name)
        if earlier is not None and earlier.value != change.value:
            message = f"{change.given} and {earlier.given} are one field, given as {change.value} and {earlier.value}"
            return FieldError(change.given, value, message)
        wishes[change.field.name] = change
    merged = values
    for change in wishes.values():
        merged = change.field.with_value(merged, change.value)
    numbers = [change for change in wishes.values() if change.field.is_number]
    # Report a value that is invalid by itself before one that conflicts with others.
    for change in numbers:
        if _is_outside(change, change.field.own_bounds(envelope)):
            return _outside(envelope, merged, change)
    for change in numbers:
        if _is_outside(change, change.field.bounds(envelope, merged)):
            return _outside(envelope, merged, change)
    for change in wishes.values():
        if reason := change.field.conflict(merged):
            return FieldError(change.given, change.value, f"{change.given} is {change.value}: {reason}")
    return merged


def _field_change(envelope: Envelope, values: LiveValues, given: str, value: object) -> _FieldChange | FieldError:
    field = BY_NAME.get(given)
    if field is None or not field.is_live(envelope):
        return _not_live(envelope, given, value)
    if not field.is_number:
        wanted = read(field.kind, given, value, choices=field.choices(envelope))
        if isinstance(wanted, InvalidValue):
            hint = f"; start the engine with {field.missing} for others" if len(field.choices(envelope)) == 1 else ""
            return FieldError(given, value, wanted.message + hint, nearest=wanted.nearest)
        return _FieldChange(field, given, wanted)
    low, high = field.bounds(envelope, values)
    wanted = read(field.kind, given, value, bounds=(low, high))
    if isinstance(wanted, InvalidValue):
        return FieldError(given, value, wanted.message, low.value, high.value, wanted.nearest)
    return _FieldChange(field, given, wanted)


def _not_live(envelope: Envelope, given: str, value: object) -> FieldError:
    if given == "data_parallel_size" and (rigid := envelope.fixed_core_count) is not None:
        asked = value if isinstance(value, int) else rigid.size
        message = f"data_parallel_size can only be changed by a restart: {rigid.why(asked)}"
        return FieldError(given, value, message, rigid.size, rigid.size, rigid.size)
    if given in BY_NAME and envelope.kv_fixed_by:
        message = (
            f"{given} changes only with a restart here: {envelope.kv_fixed_by} fixes the KV cache; "
            f"start the engine without it to size the cache by utilisation"
        )
        return FieldError(given, value, message)
    if given in envelope.restart_names:
        return FieldError(
            given,
            value,
            f"{given} changes only with a restart: start the engine again with the value that it should have",
        )
    live = [field.name for field in _live_fields(envelope)]
    close = difflib.get_close_matches(given[:MAX_ECHO_CHARACTERS], live, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"{shorten(given)} is not a field of the configuration; live fields are {', '.join(live)}{hint}"
    return FieldError(shorten(given), value, message)


def _is_outside(change: _FieldChange, bounds: Bounds) -> bool:
    low, high = bounds
    number = _number(change)
    return not low.value <= number <= high.value


def _outside(envelope: Envelope, merged: LiveValues, change: _FieldChange) -> FieldError:
    """Return the error for a value outside its bounds given the merged others, or outside its own bounds if those
    contradict.
    """
    low, high = change.field.bounds(envelope, merged)
    if low.value > high.value:
        low, high = change.field.own_bounds(envelope)
    number = _number(change)
    reason = low.reason if number < low.value else high.reason
    nearest = clamp(number, low.value, high.value)
    return FieldError(
        change.given, number, f"{change.given} is {in_words(number)}: {reason}", low.value, high.value, nearest
    )


def _number(change: _FieldChange) -> Number:
    assert not isinstance(change.value, str)  # fields with bounds are numbers
    return change.value
