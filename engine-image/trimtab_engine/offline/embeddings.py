"""What `LLM.embed` takes and returns, in vLLM's shape: how a prompt becomes a vector, and the vector."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_engine import messages
from trimtab_engine.config.pooling import Tasks
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import AddRequest
from trimtab_engine.scheduling.pooling import Pooling


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How one prompt becomes a vector. None: as the checkpoint says, or the keyword pooler_config. `dimensions`: only
    so many leading values; `normalize`, which vLLM calls use_activation too: divided by its length. Raises
    InvalidRequest for values that are not allowed."""

    task: Literal["embed"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, "embed"):
            raise InvalidRequest(f"task {self.task!r} is not supported; leave it out, or write 'embed'")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest(f"dimensions is {self.dimensions}; it must be 1 or more")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation say the same, here differently; give one")

    def pooling(self, tasks: Tasks) -> Pooling:
        """What is asked of the engine. Raises InvalidRequest where it gives no vectors, or shorter ones."""
        if tasks.no_pooling:
            raise InvalidRequest(f"this LLM gives no vectors: {tasks.no_pooling}")
        most = tasks.pooler.hidden_size
        if self.dimensions is not None and self.dimensions > most:
            raise InvalidRequest(f"dimensions is {self.dimensions}; this model's vectors have {most}")
        normalize = self.use_activation if self.normalize is None else self.normalize
        return tasks.pooler.pooling(dimensions=self.dimensions, normalize=normalize)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of float32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many values it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What one prompt has become. `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""


@dataclass(slots=True)
class Vector:
    """One vector while it is computed. It stands where a prompt that generates has its choices."""

    token_ids: Sequence[int] = ()
    """It has none."""
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    values: list[float] = field(default_factory=list)

    def take(self, output: messages.SequenceOutput, now: float) -> bool:
        """Its only output. False: the engine has ended it."""
        self.finish_reason, self.error = output.finish_reason, output.error or None
        self.num_cached_tokens = output.num_cached_tokens
        if output.pooled is not None:
            self.values = array("f", output.pooled).tolist()
        return False


@dataclass(slots=True)
class AskedVector:
    """One prompt that is to become a vector."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    add: list[AddRequest]
    choices: list[Vector] = field(default_factory=lambda: [Vector()])

    @property
    def finished(self) -> bool:
        return self.choices[0].finish_reason is not None

    def output(self) -> EmbeddingRequestOutput:
        """Raises InvalidRequest where the engine could not compute it."""
        vector = self.choices[0]
        if not vector.values:
            raise InvalidRequest(f"prompt {self.request_id} has no vector: {vector.error or vector.finish_reason}")
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=EmbeddingOutput(vector.values),
            num_cached_tokens=vector.num_cached_tokens,
        )
