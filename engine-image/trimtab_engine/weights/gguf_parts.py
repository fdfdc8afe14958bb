"""Names of GGUF files that are parts of one model, as llama.cpp's gguf-split gives them: NAME-00001-of-00003.gguf."""

import re
from collections.abc import Iterable

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 1000  # more are taken for a name like any other


def parts_of(name: str) -> tuple[str, ...]:
    """Return the file names of all parts of this model, in order; only the given name for an unsplit model."""
    found = PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_PARTS:
        return (name,)
    return tuple(f"{found['stem']}-{part:05}-of-{found['count']}.gguf" for part in range(1, int(found["count"]) + 1))


def first_parts(names: Iterable[str]) -> list[str]:
    """One name per model: of parts, that of the first, whichever of them are there."""
    return sorted({parts_of(name)[0] for name in names})
