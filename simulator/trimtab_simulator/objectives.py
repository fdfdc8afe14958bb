"""Objectives of the simulation: time to first token and gaps between tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trimtab_operator.tuner.engine_model import Allowance, Sequence

from trimtab_simulator.errors import BadRequest

SLOW_GAPS_ALLOWED = 0.05  # share of a request's gaps that may exceed --itl-token (95th percentile)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0}

_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_DURATION = re.compile(rf"{_NUMBER}\s*(ms|us|s|m)?")
_TTFT = re.compile(rf"(?P<base>{_NUMBER}\s*(?:ms|us|s|m)?)(?:\s*\+\s*(?P<more>.+))?")
_PER_RATE = re.compile(rf"1\s*/\s*{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds. A prompt of n tokens may take `ttft + n · per_prompt_token` to its first token.

    `itl_mean` bounds the mean gap between a request's tokens, `itl_token` its 95th percentile; None: no objective.
    `attain` is the share of requests that must attain all of them.
    """

    ttft: float = math.inf
    per_prompt_token: float = 0.0
    itl_mean: float | None = None
    itl_token: float | None = None
    attain: float = 0.99

    @property
    def allowance(self) -> Allowance | None:
        """Allowance that engines may order their queues by; None without a TTFT objective."""
        return Allowance(self.ttft, self.per_prompt_token) if math.isfinite(self.ttft) else None

    def ttft_of(self, prompt: int) -> float:
        """Return the TTFT limit of a prompt with this many tokens."""
        return self.ttft + prompt * self.per_prompt_token

    @property
    def slow_gap(self) -> float:
        """Gap length from which on a token is late."""
        return math.inf if self.itl_token is None else self.itl_token

    def met_by(self, sequence: Sequence) -> bool:
        """Return True if this finished request attained all objectives."""
        ttft = sequence.ttft
        if (
            ttft is None
            or sequence.finished_at is None
            or ttft > self.ttft + sequence.num_prompt * self.per_prompt_token
        ):
            return False
        num_gaps = sequence.num_output - 1
        if not num_gaps:
            return True
        if (
            self.itl_mean is not None
            and sequence.finished_at - (sequence.first_token_at or 0.0) > self.itl_mean * num_gaps
        ):
            return False
        return self.itl_token is None or sequence.num_slow_gaps <= SLOW_GAPS_ALLOWED * num_gaps

    def describe(self) -> str:
        """For people, with units: a bare 80 is 80 seconds, which shows here."""
        parts = []
        if math.isfinite(self.ttft):
            more = f" + {_time(self.per_prompt_token)} per prompt token" if self.per_prompt_token else ""
            parts.append(f"first token within {_time(self.ttft)}{more}")
        if self.itl_mean is not None:
            parts.append(f"mean gap between tokens within {_time(self.itl_mean)}")
        if self.itl_token is not None:
            parts.append(f"95 % of gaps within {_time(self.itl_token)}")
        return f"{', '.join(parts)}, for {100 * self.attain:g} % of requests"

    def to_json(self) -> dict[str, float | None]:
        """Return the objectives for the report; None is no target."""
        return {
            "ttft": self.ttft if math.isfinite(self.ttft) else None,
            "ttft_per_prompt_token": self.per_prompt_token,
            "itl_mean": self.itl_mean,
            "itl_token": self.itl_token,
            "attain": self.attain,
        }


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:g} s"
    return f"{1e3 * seconds:g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:g} us"


def parse_duration(text: str, flag: str) -> float:
    """Return the seconds of `2s`, `500ms`, `125us` or a bare number of seconds."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]) > 0:
        raise BadRequest(f"{flag} is {text!r}; it must be a time above 0 such as 2s or 500ms")
    return float(found[1]) * UNITS[found[2] or "s"]


def parse_ttft(text: str, flag: str = "--ttft") -> tuple[float, float]:
    """Return seconds, and seconds per prompt token, of `2s`, `2s+1/8000` (8,000 tokens a second) or `2s+125us`."""
    found = _TTFT.fullmatch(text.strip())
    if found is None:
        raise BadRequest(
            f"{flag} is {text!r}; it must be a time such as 2s, or 2s+1/8000 to give each prompt token 1/8000 s"
        )
    base = parse_duration(found["base"], flag)
    more = found["more"]
    if more is None:
        return base, 0.0
    rate = _PER_RATE.fullmatch(more.strip())
    if rate is not None:
        if not float(rate[1]) > 0:
            raise BadRequest(f"{flag} is {text!r}; the tokens per second after 1/ must be above 0")
        return base, 1 / float(rate[1])
    return base, parse_duration(more, flag)
