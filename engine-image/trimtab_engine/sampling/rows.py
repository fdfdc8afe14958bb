"""A request as it would stand if some of its drafts were accepted: what the sampler needs to judge the row behind
them. Penalties, min_tokens and seeds then count the drafts as if they were output."""

from dataclasses import dataclass

from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """`request` with `drafts` after its newest token. It reads like a Request; nothing is changed through it."""

    request: Request
    drafts: list[int]

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def token_ids(self) -> list[int]:
        """A copy: the request's tokens, then the drafts."""
        return self.request.token_ids + self.drafts

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + len(self.drafts)


SampledRow = Request | DraftedRequest
"""Whose next token a row of logits is for."""
