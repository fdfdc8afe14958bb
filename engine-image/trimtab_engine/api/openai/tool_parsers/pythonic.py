"""Pythonic format of Llama 4 and Llama 3.2: a response that is a list of Python calls, [f(a=1, b="x"), g()], optionally
between <|python_start|> and <|python_end|>. Arguments are literals with names.

A response that starts otherwise, or calls a function that is not offered, is text from its first character. Nothing is
evaluated: calls are parsed as syntax.
"""

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from trimtab_engine.api.openai.tool_parsers.parsed import CallDelta, Parsed
from trimtab_engine.text.tokenizer import well_formed

TAG, END_TAG = "<|python_start|>", "<|python_end|>"
NAME = r"[A-Za-z_][\w.\-]{0,99}"
BEGIN = re.compile(rf"\s*({re.escape(TAG)})?\s*\[(?=\s*{NAME}\s*\()")
MAY_BEGIN = re.compile(rf"\s*(\[\s*({NAME}\s*)?)?")
CALL = re.compile(rf"[\s,]*({NAME})\s*(\(.*\))", re.DOTALL)
JSON_WORDS = {"true": True, "false": False, "null": None}
"""JSON literals that models write instead of Python's."""


class PythonicParser:
    """Parser of Python calls. A call is emitted when its bracket closes. Text after the calls is content."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._pieces: list[str] = []
        """All text received while it may still turn out to be content."""
        self._call: list[str] = []
        """Characters of the call that is being read."""
        self._held = ""
        """Text after the calls that may still be the end tag."""
        self._depth = 0
        self._quote: str | None = None
        self._is_escaped = False
        self._is_text = self._is_open = self._is_over = False
        self._num_calls = 0

    def push(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text)
        if self._is_over:
            return self._trailing(text)
        if self._num_calls == 0:
            self._pieces.append(text)
        if self._is_open:
            return self._read(text)
        held = "".join(self._pieces)
        begins = BEGIN.match(held)
        if begins is None:
            return Parsed() if _may_begin(held) else self._as_text()
        self._is_open = True
        return self._read(held[begins.end() :])

    def flush(self) -> Parsed:
        return Parsed() if self._is_text or self._num_calls else self._as_text()

    def _as_text(self) -> Parsed:
        self._is_text = True
        return Parsed("".join(self._pieces))

    def _read(self, text: str) -> Parsed:
        """Parse more text of the list."""
        parsed = Parsed()
        for place, character in enumerate(text, start=1):
            self._call.append(character)
            if not self._closes(character):
                continue
            call = None if self._depth < 0 else read_python_call("".join(self._call))
            if call is None or (self._names is not None and call[0] not in self._names):
                if not self._num_calls:
                    return self._as_text()
                self._is_over = True
                unread = "" if self._depth < 0 else "".join(self._call).lstrip(" \t\r\n,")
                return parsed.plus(self._trailing(unread + text[place:]))
            self._call.clear()
            parsed.calls.append(CallDelta(self._num_calls, call[1], call[0]))
            self._num_calls += 1
        return parsed

    def _trailing(self, text: str) -> Parsed:
        """Return text after the calls as content, without the end tag and blanks before it."""
        self._call = []
        self._held += text
        start = self._held.lstrip()
        if END_TAG.startswith(start):
            if start == END_TAG:
                self._held = ""
            return Parsed()
        self._held = ""
        self._is_text = True
        return Parsed(start.removeprefix(END_TAG).lstrip() if start.startswith(END_TAG) else start)

    def _closes(self, character: str) -> bool:
        """Return True if the character ends a call or the list. Brackets inside strings are ignored."""
        if self._quote is not None:
            if character == self._quote and not self._is_escaped:
                self._quote = None
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False


def _may_begin(held: str) -> bool:
    """Return True if the text may become a list of calls."""
    start = held.lstrip()
    return TAG.startswith(start) or MAY_BEGIN.fullmatch(start.removeprefix(TAG)) is not None


def read_python_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments (as JSON text) of `name(key=literal, …)`, or None if it is invalid."""
    found = CALL.fullmatch(text)
    if found is None:
        return None
    try:
        node = ast.parse("f" + found[2], mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            return None
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(arguments) < len(node.keywords):
            return None
        return found[1], well_formed(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a JSON-compatible literal.

    Raises:
        ValueError: The node is anything else.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in JSON_WORDS:
        return JSON_WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return -number
    raise ValueError(f"{type(node).__name__} is not a literal")
