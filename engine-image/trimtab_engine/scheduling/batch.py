"""The work of one step, passed from the scheduler to the model runner: plain values, no policy, no tensor."""

from dataclasses import dataclass, field

from trimtab_engine.multimodal.items import MultiModalItem
from trimtab_engine.scheduling.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of a request, to be computed in this step.

    ```
    token_ids         |---- computed ----|==== this step ====|-- later --|
                      0                start       start + num_tokens   len(token_ids)
    with drafts       |---- computed ----| newest | drafts |
    ```
    `samples` is true when the newest token is among them: then the step also yields the next one. Not of a request that
    pools, which ends there. The newest token of a request that samples may be unknown when it is scheduled; it is known
    when the step begins. `draft_token_ids` are guesses beyond the newest token: the step verifies them, and yields one
    token more than it accepts.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    draft_token_ids: list[int] = field(default_factory=list)
    quiet_until: int = 0
    """Position up to which the next steps only compute the newest token: the sequence needs no block, fills no block
    and does not end. Set by the scheduler.
    """

    @property
    def ends_pooling(self) -> bool:
        """Return True if it reaches the end of a pooled prompt."""
        request = self.request
        return request.pooling is not None and self.start + self.num_tokens == request.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that was preempted to make room. `mode`: recompute or swap."""

    request: Request
    mode: str
    reason: str
    num_tokens: int
    """Computed tokens that it lost or that were moved."""


@dataclass(slots=True)
class Batch:
    """The sequences that one step computes. The next schedule() reuses the sequence objects: read them before. Copy
    `swap_out` (device, host) and then `swap_in` (host, device) blocks before computing the step.
    """

    step: int
    sequences: list[ScheduledSequence]
    num_tokens: int
    preempted: list[Preempted]
    scheduled_at: float = 0.0
    """The time passed to schedule()."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    num_offloaded: int = 0
    """Number of `swap_out` blocks that go to the host cache; the others belong to preempted requests."""
    num_restored: int = 0
    """Number of `swap_in` blocks restored from the host cache."""
    only_decodes: bool = False
    """True if every sequence computes exactly the newest token of an output and samples. Known without iterating over
    them.
    """
    computes_prompts: bool = False
    """True if some sequence computes a prompt, or recomputes lost tokens. Verifying drafts does not count."""
    sampling: list[Request] = field(default_factory=list)
    """Requests that get a token, in the order of the sequences."""
    pooling: list[Request] = field(default_factory=list)
    """Pooling requests whose prompt ends in this step, in sequence order."""
    displaced: list[bytes] = field(default_factory=list)
    """Keys of embeddings to drop before `missing` are computed."""
    missing: list[tuple[bytes, MultiModalItem]] = field(default_factory=list)
    """Images and videos to compute before the tokens, each by the key that its embeddings are kept by."""

    @property
    def kind(self) -> str:
        """prefill, decode or mixed: by whether sequences compute more than their newest token; idle when empty."""
        if not self.sequences:
            return "idle"
        if self.only_decodes or self.num_tokens == len(self.sequences) == len(self.sampling):
            return "decode"
        num_prefills = sum(1 for s in self.sequences if s.num_tokens > 1 + len(s.draft_token_ids) or not s.samples)
        if num_prefills == 0:
            return "decode"
        return "prefill" if num_prefills == len(self.sequences) else "mixed"

    @property
    def num_context_tokens(self) -> int:
        """Return the number of tokens whose keys and values the step reads: the sum of sequence lengths
        after the step.
        """
        return sum([s.start + s.num_tokens for s in self.sequences])

    @property
    def num_attended_tokens(self) -> int:
        """Pairs of a computed token and one that it attends to, itself included: what attention multiplies.

        ```
        computed before    this step          token i of the step attends to start + i + 1 tokens
        |---- start ----|==== num_tokens ====|
        ```
        """
        return sum([s.num_tokens * (2 * s.start + s.num_tokens + 1) // 2 for s in self.sequences])
