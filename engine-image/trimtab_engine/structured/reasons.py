"""Why a grammar is refused, as one sentence with its place: the library draws the text, and a caret below it."""

import re

MAX_CHARACTERS = 400
REGEX_ERROR = re.compile(r"regex parse error:\n    [^\n]*\n    (?P<before> *)\^+\nerror: (?P<what>[^\n]+)")
PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<what>.+)$")


def in_one_sentence(message: str) -> str:
    """What is wrong and where, without what is drawn: of a regular expression the character in it, of another grammar
    line and column."""
    regex = REGEX_ERROR.search(message)
    if regex:
        return f"{regex['what']}, at character {len(regex['before']) + 1}"[:MAX_CHARACTERS]
    lines = [line for line in message.splitlines() if line and not line.startswith(" ")] or [message]
    said = " ".join(" ".join(lines).split())[:MAX_CHARACTERS]
    place = PLACE.match(said)
    return said if place is None else f"{place['what']}, at line {place['line']} column {place['column']}"
