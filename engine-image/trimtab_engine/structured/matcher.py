"""Position of one request's output in its grammar: allowed next tokens, and completeness.

Follows the output tokens, not the KV cache: a preempted request keeps it. No torch: the validation process uses this
class.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trimtab_engine.structured.reasons import one_sentence

WORD_BYTES = 4  # masks are rows of 32-bit words
MAX_LEXER_EXPRESSIONS = 200_000  # limits one mask to 0.07 s as measured; llguidance's 1,000,000 gives 0.8 s
MAX_STEP_ITEMS = 50_000  # Earley items per mask; llguidance's default, about 3 ms
MAX_LEXER_STATES = 50_000  # 1-2 KB each: limits one grammar to about 100 MB
MAX_MASK_SECONDS = 0.25  # CPU time per mask; usually 0.1 ms, and at most 0.1 s for validated grammars


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer for llguidance (JSON), the larger of its size and the logits' width, and the IDs of end tokens."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def build(self) -> LLTokenizer:
        """Build llguidance's tokenizer: 0.2 s for 49,152 tokens, about 1 s for 250,000. Raises ValueError for
        inconsistent sizes.
        """
        eos = list(self.eos_token_ids) or None
        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=eos)


def mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def parser_limits() -> LLParserLimits:
    """Return the limits, equal in validation and core, so that a validated grammar cannot cost more in the core."""
    return LLParserLimits(
        initial_lexer_fuel=MAX_LEXER_EXPRESSIONS,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        precompute_large_lexemes=True,  # otherwise the first limit is not effective: a mask took 1.4 s
        verbose_errors=False,
    )


class GrammarMatcher:
    """One request's position in its grammar. Never raises for client input: see `error`."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self.num_words = num_words
        """32-bit words per mask."""
        self._overrun_seconds = 0.0
        self.mask_seconds = 0.0
        """CPU time of the last mask, or of the last ones with drafts."""

    @classmethod
    def of(cls, tokenizer: LLTokenizer, grammar: str) -> "GrammarMatcher":
        """Return a matcher at the start of the grammar. A grammar that cannot be built gives a matcher with an
        `error`.
        """
        return cls(LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()), mask_words(tokenizer.vocab_size))

    def copy(self) -> "GrammarMatcher":
        """Return a copy at the same position."""
        return GrammarMatcher(self._matcher.deep_copy(), self.num_words)

    @property
    def error(self) -> str | None:
        """Reason why it cannot continue: a limit was reached, or a token was not allowed. None otherwise."""
        if self._overrun_seconds:
            return f"one mask took {self._overrun_seconds:.2f} s of CPU time, above {MAX_MASK_SECONDS} s"
        if not self._matcher.is_error():
            return None
        return one_sentence(self._matcher.get_error().split("\n<")[0]) or "unknown error"

    @property
    def is_complete(self) -> bool:
        """Return True if only the end may follow: the grammar has ended, or the end of sequence was accepted."""
        return bool(self._matcher.is_stopped())

    def accept(self, token_ids: Sequence[int]) -> None:
        """Accept these tokens; tokens after the end of sequence are ignored."""
        for token_id in token_ids:
            if self._matcher.is_stopped() or not self._matcher.consume_token(token_id):
                return

    def num_acceptable(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, the grammar allows in sequence. The matcher does not
        change.
        """
        return int(self._matcher.validate_tokens(list(token_ids)))

    def fill(self, address: int, num_bytes: int) -> None:
        """Write the mask of the next token to memory. A complete matcher only allows the end of sequence."""
        before = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        seconds = time.thread_time() - before
        self.mask_seconds += seconds
        if seconds > MAX_MASK_SECONDS:
            self._overrun_seconds = seconds

    def fill_with_drafts(self, draft_token_ids: Sequence[int], address: int, num_bytes: int) -> None:
        """Write 1 + len(draft) masks, `num_bytes` apart: before the first draft token, and after each one.

        After a draft token that the grammar does not allow, the last mask is repeated: that token is never accepted, so
        the following masks are not read. The matcher's position does not change.
        """
        self.mask_seconds = 0.0
        self.fill(address, num_bytes)
        num_taken = 0
        for place, token_id in enumerate(draft_token_ids, 1):
            is_allowed = num_taken == place - 1 and not self.is_complete and self.num_acceptable([token_id]) == 1
            if is_allowed and self._matcher.consume_token(token_id):
                num_taken += 1
            self.fill(address + place * num_bytes, num_bytes)
        if num_taken:
            self._matcher.rollback(num_taken)
