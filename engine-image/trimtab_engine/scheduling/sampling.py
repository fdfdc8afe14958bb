"""Sampling parameters of a request and log-probabilities of tokens: plain values that are sent in messages."""

import math
from array import array
from collections.abc import Iterable, Iterator

import msgspec


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one sequence. Values are already validated by the API (api/openai/protocol.py).

    temperature 0 is greedy. top_k 0 means all tokens. `logprobs` is the number of most likely tokens to
    report in addition to the chosen one (None: nothing is reported, 0: only the chosen token's). `stop_token_ids` end
    the request with finish_reason stop; the model's own end-of-sequence ids do too unless `ignore_eos`. Stop *strings*
    are the API server's task. `n` is fanned out by the API server: here one request is one sequence.

    `grammar` is llguidance's JSON format of the output's grammar, validated by the API server. `logit_bias` is added
    to the logits; if there are `allowed_tokens` (token_mask()), one of them is chosen; the last token of a sequence of
    `bad_words` is not chosen if the output ends with the preceding ones.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_tokens: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's own tokens from the second on."""

    @property
    def is_plain(self) -> bool:
        """True if tokens are chosen from unmodified logits, independent of previous tokens, without any report."""
        return (
            self.presence_penalty == self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.logprobs is self.prompt_logprobs is None
            and self.grammar is None
            and not (self.min_tokens or self.bad_words or self.logit_bias or self.allowed_tokens)
        )


def token_mask(token_ids: Iterable[int]) -> bytes:
    """Return a set of tokens as a bitmask: token t is bit t % 8 of byte t // 8, as in grammar masks. Some 50,000 tokens
    take 6 KiB in each message of a request's choices, and no work per token in a step.
    """
    mask = bytearray()
    for token_id in token_ids:
        place = token_id >> 3
        if place >= len(mask):
            mask.extend(bytes(place + 1 - len(mask)))
        mask[place] |= 1 << (token_id & 7)
    return bytes(mask)


def tokens_of(mask: bytes) -> list[int]:
    """Return the tokens of a bitmask in ascending order."""
    return [place * 8 + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token among all tokens; 1 is the most likely."""


class PackedLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of many positions in a few bytes per value; as Python objects they would take a hundred. Reads
    like a list of TokenLogprobs. Values are float32, as they are computed.
    """

    counts: bytearray = msgspec.field(default_factory=bytearray)
    """Number of token ids at each position; this and all following are 32 bits each."""
    ranks: bytearray = msgspec.field(default_factory=bytearray)
    token_ids: bytearray = msgspec.field(default_factory=bytearray)
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    """NaN at a position without log-probabilities: the first token of a prompt."""

    @classmethod
    def of(cls, positions: "Iterable[TokenLogprobs]") -> "PackedLogprobs":
        packed = cls()
        packed.extend(positions)
        return packed

    def extend(self, positions: "Iterable[TokenLogprobs]") -> None:
        """Append positions."""
        if isinstance(positions, PackedLogprobs):
            self.counts += positions.counts
            self.ranks += positions.ranks
            self.token_ids += positions.token_ids
            self.logprobs += positions.logprobs
            return
        counts, ranks, token_ids, logprobs = array("i"), array("i"), array("i"), array("f")
        for position in positions:
            counts.append(len(position.token_ids))
            ranks.append(position.rank)
            token_ids.extend(position.token_ids)
            logprobs.extend(position.logprobs or [math.nan] * len(position.token_ids))
        self.counts += counts.tobytes()
        self.ranks += ranks.tobytes()
        self.token_ids += token_ids.tobytes()
        self.logprobs += logprobs.tobytes()

    @property
    def num_values(self) -> int:
        """Number of token ids at all positions."""
        return len(self.token_ids) // 4

    def __len__(self) -> int:
        return len(self.counts) // 4

    def __iter__(self) -> "Iterator[TokenLogprobs]":
        token_ids, logprobs = array("i", bytes(self.token_ids)), array("f", bytes(self.logprobs))
        start = 0
        for count, rank in zip(array("i", bytes(self.counts)), array("i", bytes(self.ranks)), strict=True):
            values = logprobs[start : start + count].tolist()
            has_values = not (values and math.isnan(values[0]))
            yield TokenLogprobs(token_ids[start : start + count].tolist(), values if has_values else [], rank)
            start += count
