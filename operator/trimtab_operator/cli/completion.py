"""Shell completion of `trimtab` without its imports, which take longer than a user waits for a completion.

completion.json has the commands, flags and values. It is generated from the parsers of `trimtab` and `trimtab-engine`
(`make reference`). Names of objects in a cluster are left to the application, which reads them.
"""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("completion.json")
APPLICATION = "application"
"""Instead of values: only the application knows them."""
MODE, BASH = "_TRIMTAB_COMPLETE", "complete_bash"  # typer's protocol


def complete(words: Sequence[str], incomplete: str) -> list[str] | None:
    """Return the completions of the last word of a command line; empty for paths and free text.

    Args:
        words: The words between `trimtab` and the last one.
        incomplete: The beginning of the last word.

    Returns:
        None if only the application knows the completions.
    """
    command: dict[str, Any] = json.loads(FILE.read_text())
    previous = ""
    for word in words:
        previous = "" if word in command["commands"] else word
        command = command["commands"].get(word, command)
    known = command["flags"].get(previous)  # None for switches and other words
    if known is None and incomplete.startswith("-"):
        known = list(command["flags"])
    elif known is None:
        known = list(command["commands"]) or command["arguments"]
    return None if known == APPLICATION else [word for word in known if word.startswith(incomplete)]


def print_completions() -> bool:
    """Print the completions for bash. Return False without a request of bash, or if only the application knows them."""
    if os.environ.get(MODE) != BASH:
        return False
    try:
        words = shlex.split(os.environ["COMP_WORDS"])
        position = int(os.environ["COMP_CWORD"])
    except (KeyError, ValueError):  # such as an open quotation mark
        return False
    completions = complete(words[1:position], words[position] if position < len(words) else "")
    if completions is None:
        return False
    print("\n".join(completions))
    return True
