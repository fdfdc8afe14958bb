"""View of a request with some of its drafts accepted: the sampler's input for the row after them. Penalties, min_tokens
and seeds then count the drafts as output.
"""

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
"""Request whose next token a row of logits is for."""
