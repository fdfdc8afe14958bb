"""Inputs of a step's random choices, in columns that stay on the device while the step's requests stay the same.

Only the seeds change in each step. A seeded request draws from crc32("SEED POSITION"), which is affine over the bits:
the contribution of the part before the position depends only on the number of digits that follow.

    crc32(digits, before) = crc32(digits) ^ crc32(zeros, before) ^ crc32(zeros)      zeros: as many bytes as digits
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from typing import Any, Protocol

import numpy as np
import torch

from trimtab_engine.device.transfer import send, send_together
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling

Array = np.ndarray[Any, Any]
MOST_DIGITS = 8  # of a position in an output
POWERS = 10 ** np.arange(1, MOST_DIGITS)
ALL_ONES = 0xFFFFFFFF
PARAMETERS = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
        ("is_seeded", "?"),
        ("before", "<u4", (MOST_DIGITS,)),
    ]
)
PACKED_PARAMETERS = Struct(f"<fffi?{MOST_DIGITS}I")
NAMES = ("temperature", "top_p", "min_p", "top_k")


class Chooser(Protocol):
    """Inputs of greedy or random choice, in addition to the logits."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A Chooser of known values."""

    sampling: Sampling
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows of plain requests: each token is chosen from the model's own logits. `ends` [rows] int64: at which position
    of its request the token will be.
    """

    requests: list[Request]
    ends: Array

    def choices(self) -> list[Choice]:
        pairs = zip(self.requests, self.ends.tolist(), strict=True)
        return [Choice(request.sampling, end - request.num_prompt_tokens) for request, end in pairs]


def kept_by_top_k(p: Sampling, vocab_size: int) -> int:
    """Return top_k, limited to a device's int32."""
    return min(p.top_k or vocab_size, vocab_size)


def packed_parameters(p: Sampling, vocab_size: int) -> bytes:
    """One request's row of PARAMETERS, made once; the columns of a step are one join away."""
    before = [0] * MOST_DIGITS if p.seed is None else _before_digits(zlib.crc32(f"{p.seed} ".encode()))
    top_k = kept_by_top_k(p, vocab_size)
    return PACKED_PARAMETERS.pack(p.temperature, p.top_p, p.min_p, top_k, p.seed is not None, *before)


def _before_digits(hashed: int) -> list[int]:
    zeros = [bytes(count) for count in range(1, MOST_DIGITS + 1)]
    return [zlib.crc32(some, hashed) ^ zlib.crc32(some) for some in zeros]


@lru_cache
def digit_hashes(num_digits: int) -> Array:
    """crc32 of each number below 10^num_digits, as it is written: [10^num_digits] uint32. A number's follows from that
    of the number without its last digit.
    """
    table = np.array([zlib.crc32(bytes([byte]), ALL_ONES) ^ ALL_ONES for byte in range(256)], np.uint32)
    hashes = np.array([zlib.crc32(b"%d" % number) for number in range(10)], np.uint32)
    for _ in range(1, num_digits):
        state = hashes[:, None] ^ np.uint32(ALL_ONES)
        digit = np.arange(ord("0"), ord("9") + 1, dtype=np.uint32)[None, :]
        longer = table[(state ^ digit) & np.uint32(0xFF)] ^ (state >> np.uint32(8)) ^ np.uint32(ALL_ONES)
        hashes = np.concatenate([hashes[:10], longer.reshape(-1)[10:]])
    return hashes


@dataclass(slots=True)
class _OfDigits:
    """Constants that depend on the number of digits of the rows' positions: cached, since few steps change it."""

    digits: bytes = b""
    hashes: Array = field(default_factory=lambda: digit_hashes(1))
    before: Array = field(default_factory=lambda: np.zeros(0, np.uint32))


@dataclass(frozen=True, slots=True)
class ChoiceColumns:
    """Columns [rows] each; those used by kernels are on the device."""

    num_prompt_tokens: Array
    num_seeded: int
    is_seeded: torch.Tensor
    """On the host."""
    before: Array
    """[rows, MOST_DIGITS] uint32: contribution of a request's seed to the hash, by the number of digits of the
    position."""
    rows: Array
    """Their numbers."""
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    _kept: _OfDigits = field(default_factory=_OfDigits, init=False)

    @classmethod
    def of(cls, packed: Sequence[bytes], num_prompt_tokens: Sequence[int], device: torch.device) -> "ChoiceColumns":
        rows: Any = np.frombuffer(b"".join(packed), PARAMETERS)
        sent = send_together([torch.tensor(rows[name].copy()) for name in NAMES], device)
        is_seeded, before = rows["is_seeded"].copy(), rows["before"].copy()
        prompts = np.array(num_prompt_tokens, np.int64)
        numbers = np.arange(len(rows))
        return cls(prompts, int(is_seeded.sum()), torch.from_numpy(is_seeded), before, numbers, *sent)

    def seeds(self, num_output_tokens: Array) -> torch.Tensor:
        """[rows] int64, on the host. A request without a seed takes one from torch's generator."""
        num_rows = len(self.rows)
        if not self.num_seeded:
            return torch.randint(1 << 62, (num_rows,))
        digits = POWERS.searchsorted(num_output_tokens, side="right")
        kept = self._kept
        if (packed := digits.tobytes()) != kept.digits:
            kept.digits, kept.hashes = packed, digit_hashes(int(digits.max()) + 1)
            kept.before = self.before[self.rows, digits]
        own = torch.from_numpy((kept.hashes[num_output_tokens] ^ kept.before).astype(np.int64))
        if self.num_seeded == num_rows:
            return own
        return torch.where(self.is_seeded, own, torch.randint(1 << 62, (num_rows,)))

    def seeds_on(self, device: torch.device, num_output_tokens: Array) -> torch.Tensor:
        return send(self.seeds(num_output_tokens), device)
