"""Maximum images and videos per prompt: `--limit-mm-per-prompt '{"image": 2, "video": 0}'`, vLLM's flag."""

import difflib
from typing import Any

from trimtab_engine.config.json_flags import read_json_object
from trimtab_engine.errors import ConfigError, NotSupportedError

FLAG = "--limit-mm-per-prompt"
EXAMPLE = """'{"image": 2, "video": 0}'"""
UNLIMITED = {"image": 999, "video": 999}
"""vLLM's defaults."""
OTHERS = ("audio", "vision_chunk")
"""vLLM's, of which no model here takes any."""
MAX_COUNT = 10_000


def parse_modality_limits(text: str) -> dict[str, int]:
    """Return the maximum per kind in one prompt, 0: none.

    Raises:
        ConfigError: For invalid JSON or unknown names.
        NotSupportedError: For other modalities and options of vLLM's.
    """
    fields = read_json_object(FLAG, text, EXAMPLE)
    counts = {name: _count(name, value) for name, value in fields.items()}
    return UNLIMITED | {name: count for name, count in counts.items() if name in UNLIMITED}


def _count(name: str, value: Any) -> int:
    if name not in UNLIMITED and name not in OTHERS:
        close = difflib.get_close_matches(name, UNLIMITED, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; its keys are {' and '.join(UNLIMITED)}"
        raise ConfigError(f"{FLAG} has {name[:50]!r}{hint}")
    if isinstance(value, dict):
        others = sorted(value.keys() - {"count"})
        if others:
            raise NotSupportedError(
                f"{FLAG}: {name}.{others[0][:50]} is not supported yet; give only the count: {EXAMPLE}"
            )
        value = value.get("count", UNLIMITED.get(name, 0))
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ConfigError(f"{FLAG}: {name} is {str(value)[:50]}; write a whole number from 0 to {MAX_COUNT}: {EXAMPLE}")
    if name in OTHERS and value:
        raise NotSupportedError(f"{FLAG}: {name} input is not supported yet; leave it out")
    return value
