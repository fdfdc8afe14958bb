"""--eplb-config as a typed value: when experts are balanced over their ranks. Names and defaults are vLLM's.

Knows no tensor: the API server's process reads it as well.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from trimtab_engine.config.json_flags import convert_fields, read_json_object
from trimtab_engine.errors import ConfigError, NotSupportedError

FLAG = "--eplb-config"
MAX_STEPS = 1_000_000_000  # of a window or interval: a year of steps; refuses nonsense
MAX_REDUNDANT = 4096  # spare slots, over all ranks: as many as there may be ranks
IGNORED_FIELDS: dict[str, tuple[object, ...]] = {
    "use_async": (None, False),
    "policy": (None, "default"),
    "communicator": (None,),
}
"""Further fields of vLLM's, and the values that match the built-in behavior."""


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Expert parallel load balancing. Steps are those of the ranks, including padding ones."""

    window_size: int = 1000
    """Number of steps whose load a rearrangement uses."""
    step_interval: int = 3000
    """Steps between two rearrangements."""
    num_redundant_experts: int = 0
    """Slots beyond one per expert, over all ranks of the expert group."""
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    """Steps between two lines."""

    def __post_init__(self) -> None:
        for name in ("window_size", "step_interval", "log_balancedness_interval"):
            _check(name, getattr(self, name), 1, MAX_STEPS)
        _check("num_redundant_experts", self.num_redundant_experts, 0, MAX_REDUNDANT)


def parse_eplb_json(text: str) -> dict[str, Any]:
    """Return the JSON object of --eplb-config. Raises ConfigError."""
    return read_json_object(FLAG, text, _EXAMPLE)


def eplb_config(values: Mapping[str, Any]) -> EplbConfig:
    """Judge the fields. Raises ConfigError, NotSupportedError for what vLLM has and we do not."""
    fields = {name: value for name, value in values.items() if value is not None}
    for name, harmless in IGNORED_FIELDS.items():
        if fields.pop(name, None) not in harmless:
            why = "; experts are rearranged between two steps" if name == "use_async" else ""
            raise NotSupportedError(f"{FLAG}: {name} {values[name]!r} is not supported{why}; leave it out")
    unknown = sorted(fields.keys() - set(FIELDS))
    if unknown:
        raise ConfigError(f"{FLAG}: there is no {unknown[0]}; its fields are {', '.join(FIELDS)}")
    return convert_fields(FLAG, fields, EplbConfig)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{FLAG}: {name} is {value}; it must be {least} to {most}")


FIELDS = [field.name for field in msgspec.structs.fields(EplbConfig)]
_EXAMPLE = '{"num_redundant_experts": 8, "step_interval": 3000}'
