"""A client's grammar, tried before the engine core sees it, in a process to be killed (ipc/bounded_worker.py).

What llguidance's own check passes can still build for ten seconds, need a second for a mask, or overflow the stack. So
a trial builds the grammar as the core would, in a smaller stack, and takes a few steps into it, with the core's limits
and tighter ones. See docs/guides/structured-output.md for the sizes, ADR-0007 for why.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from

from trimtab_engine.ipc.frames import serve_frames
from trimtab_engine.structured.deep_stack import deep_stack_executor
from trimtab_engine.structured.matcher import WORD_BYTES, GrammarMatcher, Vocabulary
from trimtab_engine.structured.reasons import in_one_sentence

STACK_BYTES = 2 << 20  # a thirty-second of the core's (deep_stack.py)
NUM_STEPS = 12  # into the grammar, along random tokens that it allows
MAX_MASK_SECONDS = 0.1  # of processor time; usual is a hundredth of it, and the core ends a request at 0.25
WHITESPACE = r"[ \t\r\n]{1,64}"
"""Between JSON's tokens, unless a request says otherwise. A bound, as small models would write spaces for ever."""

Json = dict[str, Any]


def grammar_text(spec: Mapping[str, Any]) -> str:
    """llguidance's form of a checked specification (api/openai/constraints.py: Constraint). Raises ValueError."""
    kind, value = spec["kind"], spec["value"]
    match kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(value, overrides=_json_options(spec)))
        case "regex":
            return str(LLMatcher.grammar_from_regex(value))
        case "choice":
            return grammar_from("choice", value)
        case "grammar":
            return grammar_from("grammar", value)
        case "llguidance":
            return str(value)
    raise ValueError(f"there is no grammar of kind {kind!r}")


def _json_options(spec: Mapping[str, Any]) -> Any:
    """`oneOf` is taken for `anyOf`, which llguidance can do, as schema generators write the one and mean the other."""
    if spec.get("any_whitespace") is False:
        return {"whitespace_flexible": False, "coerce_one_of": True}
    return {"whitespace_pattern": spec.get("whitespace_pattern") or WHITESPACE, "coerce_one_of": True}


def try_grammar(tokenizer: LLTokenizer, spec: Mapping[str, Any]) -> Json:
    """{"grammar": llguidance's JSON} or {"error": why it is refused}."""
    try:
        grammar = grammar_text(spec)
    except ValueError as error:
        return {"error": in_one_sentence(str(error))}
    matcher = GrammarMatcher.of(tokenizer, grammar)
    refusal = matcher.error or _walk(matcher)
    return {"grammar": grammar} if refusal is None else {"error": refusal}


def _walk(matcher: GrammarMatcher) -> str | None:
    """Take a few steps; why the grammar is refused, None when it is not."""
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
            return f"it takes {seconds:.2f} s to say what may come next, above {MAX_MASK_SECONDS} s; make it simpler"
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
    return lambda spec: executor.submit(try_grammar, tokenizer, spec).result()


if __name__ == "__main__":
    serve_frames(start)
