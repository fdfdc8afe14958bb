"""Latency objectives, and whether requests attain them.

TTFT objectives may grow with the prompt. ITL objectives apply either to a request's mean gap or to every gap between
two tokens: a single slow step hardly changes the mean of a long answer, but it violates single gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from trimtab_operator.tuner.engine_model import Allowance, StepCost

DEFAULT_FACTOR = 3.0  # default objectives, as a multiple of an idle engine's latency
DEFAULT_SHARE = 0.95


class ItlKind(StrEnum):
    """The inter-token latency that an objective applies to."""

    MEAN = "mean"  # a request's mean gap
    TOKENS = "tokens"  # each gap between two tokens


@dataclass(frozen=True, slots=True)
class Ttft:
    """The first token arrives within `seconds` + `seconds_per_prompt_token` × prompt tokens, for `share` of the
    requests.
    """

    seconds: float
    seconds_per_prompt_token: float = 0.0
    share: float = DEFAULT_SHARE

    def limit(self, prompt_tokens: float) -> float:
        """Return the TTFT limit in seconds for a prompt of this length."""
        return self.seconds + self.seconds_per_prompt_token * prompt_tokens


@dataclass(frozen=True, slots=True)
class Itl:
    """Gaps, or mean gaps, are at most `seconds` for `share` of the gaps, or requests."""

    seconds: float
    kind: ItlKind = ItlKind.MEAN
    share: float = DEFAULT_SHARE


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives. `are_given` is False for the defaults."""

    ttft: Ttft | None = None
    itl: Itl | None = None
    are_given: bool = True
    order_queues: bool = False
    """True if engines serve requests first that can still attain TTFT (queue order `deadline`)."""

    @property
    def allowance(self) -> Allowance | None:
        """TTFT allowance that engines order their queues by; None for order of arrival."""
        if self.ttft is None or not self.order_queues:
            return None
        return Allowance(self.ttft.seconds, self.ttft.seconds_per_prompt_token)

    @property
    def share(self) -> float:
        """Share of requests that must attain every objective: the smaller of the two."""
        shares = [objective.share for objective in (self.ttft, self.itl) if objective is not None]
        return min(shares) if shares else DEFAULT_SHARE

    def is_met(self, *, prompt: int, ttft: float | None, mean_gap: float | None) -> bool:
        """Return True if one request attained its objectives. Token-gap objectives are judged over all requests
        instead.
        """
        if self.ttft is not None and (ttft is None or ttft > self.ttft.limit(prompt)):
            return False
        if self.itl is None or self.itl.kind is not ItlKind.MEAN:
            return True
        return mean_gap is None or mean_gap <= self.itl.seconds

    @property
    def slow_gap(self) -> float:
        """Gap length from which on a single gap violates the objective; infinity without a token-gap objective."""
        return self.itl.seconds if self.itl is not None and self.itl.kind is ItlKind.TOKENS else math.inf

    def with_defaults(self, cost: StepCost, *, typical_context: float) -> Objectives:
        """Return the objectives, or defaults (3 × an idle engine's latency) if none is given.

        With one objective given, the other one stays unset.
        """
        if self.ttft is not None or self.itl is not None:
            return self
        decode = cost.seconds(1, 1, round(typical_context), round(typical_context))
        ttft = Ttft(
            seconds=DEFAULT_FACTOR * (cost.per_step + cost.per_prefill_step + cost.per_sequence),
            seconds_per_prompt_token=DEFAULT_FACTOR * (cost.per_token + cost.per_attended * typical_context / 2),
        )
        return Objectives(ttft, Itl(DEFAULT_FACTOR * decode), are_given=False)
