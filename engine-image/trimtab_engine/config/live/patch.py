"""The live configuration: what PATCH /admin/v1/config accepts, refuses and answers (docs/reference/contract.md
section 2).

Pure: a LiveConfig is a value and patch() gives the next one with the HTTP status and body. Applying it between two
steps, and everything HTTP, are the caller's. What there is to change is fields.py's table.

Rules are judged on the merged result: what is in force, overlaid with everything that the PATCH sets. `min` and `max`
that are reported take the rest of it as given.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_engine.config.live.fields import BY_NAME, FIELDS, Field
from trimtab_engine.config.live.reading import (
    MAX_ECHO_CHARACTERS,
    Bounds,
    Json,
    Number,
    Refusal,
    Unreadable,
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
        """The live fields' values, as answers have them."""
        return _shown(self.envelope, self.values)

    def numbers(self) -> dict[str, float]:
        """The fields that are numbers or switches (1 is on): the values of trimtab_config_value."""
        return {name: float(value) for name, value in self.shown().items() if not isinstance(value, str)}

    def texts(self) -> dict[str, str]:
        """The fields that are choices, as text."""
        return {name: value for name, value in self.shown().items() if isinstance(value, str)}

    def describe(self) -> Json:
        """The body of GET /admin/v1/config. Changes are applied as they are accepted: desired equals applied."""
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
        if isinstance(merged, Refusal):
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
class _Wish:
    """What a PATCH asks of one field, and the name that it used for it."""

    field: Field
    given: str
    value: Value


def _merge(envelope: Envelope, values: LiveValues, patch: Mapping[object, object]) -> LiveValues | Refusal:
    """What is in force overlaid with the patch, or why not. Types and classes first, then bounds in order of fields."""
    wishes: dict[str, _Wish] = {}
    for name, value in patch.items():
        wish = _wish(envelope, values, str(name), value)
        if isinstance(wish, Refusal):
            return wish
        earlier = wishes.get(wish.field.name)
        if earlier is not None and earlier.value != wish.value:
            message = f"{wish.given} and {earlier.given} are one field, given as {wish.value} and {earlier.value}"
            return Refusal(wish.given, value, message)
        wishes[wish.field.name] = wish
    merged = values
    for wish in wishes.values():
        merged = wish.field.with_value(merged, wish.value)
    numbers = [wish for wish in wishes.values() if wish.field.is_number]
    # A value that is wrong by itself is named before one that is wrong beside others.
    for wish in numbers:
        if _is_outside(wish, wish.field.own_bounds(envelope)):
            return _outside(envelope, merged, wish)
    for wish in numbers:
        if _is_outside(wish, wish.field.bounds(envelope, merged)):
            return _outside(envelope, merged, wish)
    for wish in wishes.values():
        if reason := wish.field.conflict(merged):
            return Refusal(wish.given, wish.value, f"{wish.given} is {wish.value}: {reason}")
    return merged


def _wish(envelope: Envelope, values: LiveValues, given: str, value: object) -> _Wish | Refusal:
    field = BY_NAME.get(given)
    if field is None or not field.is_live(envelope):
        return _not_live(envelope, given, value)
    if not field.is_number:
        wanted = read(field.kind, given, value, choices=field.choices(envelope))
        if isinstance(wanted, Unreadable):
            hint = f"; start the engine with {field.missing} for others" if len(field.choices(envelope)) == 1 else ""
            return Refusal(given, value, wanted.message + hint, nearest=wanted.nearest)
        return _Wish(field, given, wanted)
    low, high = field.bounds(envelope, values)
    wanted = read(field.kind, given, value, bounds=(low, high))
    if isinstance(wanted, Unreadable):
        return Refusal(given, value, wanted.message, low.value, high.value, wanted.nearest)
    return _Wish(field, given, wanted)


def _not_live(envelope: Envelope, given: str, value: object) -> Refusal:
    if given == "data_parallel_size" and (rigid := envelope.rigid_cores) is not None:
        asked = value if isinstance(value, int) else rigid.size
        message = f"data_parallel_size changes only with a restart here: {rigid.why(asked)}"
        return Refusal(given, value, message, rigid.size, rigid.size, rigid.size)
    if given in BY_NAME and envelope.kv_fixed_by:
        message = (
            f"{given} changes only with a restart here: {envelope.kv_fixed_by} fixes the KV cache; "
            f"start the engine without it to size the cache by utilisation"
        )
        return Refusal(given, value, message)
    if given in envelope.restart_names:
        return Refusal(
            given,
            value,
            f"{given} changes only with a restart: start the engine again with the value that it should have",
        )
    live = [field.name for field in _live_fields(envelope)]
    close = difflib.get_close_matches(given[:MAX_ECHO_CHARACTERS], live, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"{shorten(given)} is not a field of the configuration; live fields are {', '.join(live)}{hint}"
    return Refusal(shorten(given), value, message)


def _is_outside(wish: _Wish, bounds: Bounds) -> bool:
    low, high = bounds
    number = _number(wish)
    return not low.value <= number <= high.value


def _outside(envelope: Envelope, merged: LiveValues, wish: _Wish) -> Refusal:
    """The refusal of a value outside its bounds beside the merged others, or outside its own when those contradict."""
    low, high = wish.field.bounds(envelope, merged)
    if low.value > high.value:
        low, high = wish.field.own_bounds(envelope)
    number = _number(wish)
    reason = low.reason if number < low.value else high.reason
    nearest = clamp(number, low.value, high.value)
    return Refusal(wish.given, number, f"{wish.given} is {in_words(number)}: {reason}", low.value, high.value, nearest)


def _number(wish: _Wish) -> Number:
    assert not isinstance(wish.value, str)  # fields with bounds are numbers
    return wish.value
