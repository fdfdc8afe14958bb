"""Validation of a client's grammar before the engine core gets it, in a killable process (ipc/bounded_worker.py).

Grammars that pass llguidance's own check can still build for ten seconds, need a second per mask, or overflow the
stack. So the validation builds the grammar as the core would, in a smaller stack, and takes a few steps, with the
core's limits and tighter ones. See docs/guides/structured-output.md for the sizes, ADR-0007 for the reasons.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from

from trimtab_engine.ipc.frames import serve_frames
from trimtab_engine.structured.deep_stack import deep_stack_executor
from trimtab_engine.structured.json_schema import read_enforceable_schema
from trimtab_engine.structured.matcher import WORD_BYTES, GrammarMatcher, Vocabulary
from trimtab_engine.structured.reasons import one_sentence

STACK_BYTES = 2 << 20  # 1/32 of the core's (deep_stack.py)
NUM_STEPS = 12  # along random allowed tokens
MAX_MASK_SECONDS = 0.1  # CPU time; usually 1 % of it, and the core ends a request at 0.25
WHITESPACE = r"[ \t\r\n]{1,64}"
"""Default whitespace between JSON tokens. Limited, because small models would generate blanks forever."""

Json = dict[str, Any]


def grammar_text(spec: Mapping[str, Any]) -> str:
    """Return llguidance's form of a checked constraint (api/openai/constraints.py: Constraint). Raises ValueError."""
    kind, value = spec["kind"], spec["value"]
    match kind:
        case "json":
            schema = json.dumps(read_enforceable_schema(value), ensure_ascii=False)
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(spec)))
        case "regex":
            return str(LLMatcher.grammar_from_regex(value))
        case "choice":
            return grammar_from("choice", value)
        case "grammar":
            return grammar_from("grammar", value)
        case "llguidance":
            return str(value)
    raise ValueError(f"unknown grammar kind {kind!r}")


def _json_options(spec: Mapping[str, Any]) -> Any:
    """Treat `oneOf` as `anyOf`, which llguidance supports: schema generators emit the former but mean the latter."""
    if spec.get("any_whitespace") is False:
        return {"whitespace_flexible": False, "coerce_one_of": True}
    return {"whitespace_pattern": spec.get("whitespace_pattern") or WHITESPACE, "coerce_one_of": True}


def validate_grammar(tokenizer: LLTokenizer, spec: Mapping[str, Any]) -> Json:
    """Return {"grammar": llguidance's JSON} or {"error": reason}."""
    try:
        grammar = grammar_text(spec)
    except ValueError as error:
        return {"error": one_sentence(str(error))}
    matcher = GrammarMatcher.of(tokenizer, grammar)
    refusal = matcher.error or _take_steps(matcher)
    return {"grammar": grammar} if refusal is None else {"error": refusal}


def _take_steps(matcher: GrammarMatcher) -> str | None:
    """Take a few steps. Return the reason of a rejection, or None."""
    row = np.zeros((1, matcher.num_words), dtype=np.int32)
    choose = random.Random(0)
    for step in range(NUM_STEPS):
        began = time.thread_time()
        matcher.fill(row.ctypes.data, matcher.num_words * WORD_BYTES)
        seconds = time.thread_time() - began
        if step == 0 and (matcher.error or "").startswith("NoExtension"):
            return "no text matches it"
        if matcher.error is not None:
            return matcher.error
        if seconds > MAX_MASK_SECONDS:
            return f"computing the allowed tokens takes {seconds:.2f} s, above {MAX_MASK_SECONDS} s; simplify it"
        allowed = np.nonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little"))[0]
        if matcher.is_complete or len(allowed) == 0:
            return None
        matcher.accept([int(allowed[choose.randrange(len(allowed))])])
        if matcher.error is not None:
            return matcher.error
    return None


def start(settings: Json) -> Callable[[Json], Json]:
    vocabulary = Vocabulary(settings["tokenizer_json"], settings["vocab_size"], tuple(settings["eos_token_ids"]))
    tokenizer = vocabulary.build()
    executor = deep_stack_executor("trial", STACK_BYTES)
    return lambda spec: executor.submit(validate_grammar, tokenizer, spec).result()


if __name__ == "__main__":
    serve_frames(start)
