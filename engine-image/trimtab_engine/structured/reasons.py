"""Grammar errors as one sentence with a position: the library prints the text with a caret below."""

import re

MAX_CHARACTERS = 400
REGEX_ERROR = re.compile(r"regex parse error:\n    [^\n]*\n    (?P<before> *)\^+\nerror: (?P<what>[^\n]+)")
PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<what>.+)$")


def one_sentence(message: str) -> str:
    """Return the error and its position without the drawing: the character of a regular expression, line and column of
    another grammar.
    """
    regex = REGEX_ERROR.search(message)
    if regex:
        return f"{regex['what']}, at character {len(regex['before']) + 1}"[:MAX_CHARACTERS]
    lines = [line for line in message.splitlines() if line and not line.startswith(" ")] or [message]
    text = " ".join(" ".join(lines).split())[:MAX_CHARACTERS]
    place = PLACE.match(text)
    return text if place is None else f"{place['what']}, at line {place['line']} column {place['column']}"
