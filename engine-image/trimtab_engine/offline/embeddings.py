"""Parameters and results of `LLM.embed`, compatible with vLLM."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_engine.config.pooling import Tasks
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.requests import AddRequest, SequenceOutput
from trimtab_engine.scheduling.pooling import Pooling


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Pooling parameters of one prompt. None selects the checkpoint's setting, or that of the keyword pooler_config.
    `dimensions` truncates the vector; `normalize` (vLLM's use_activation) divides it by its length. Raises
    InvalidRequest for invalid values.
    """

    task: Literal["embed"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, "embed"):
            raise InvalidRequest(f"task {self.task!r} is not supported; remove it, or use 'embed'")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest(f"dimensions must be 1 or more ({self.dimensions})")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequest("normalize and use_activation conflict; set only one")

    def pooling(self, tasks: Tasks) -> Pooling:
        """Return the engine's pooling parameters. Raises InvalidRequest if it does not compute embeddings, or only
        shorter ones.
        """
        if tasks.no_pooling:
            raise InvalidRequest(f"this LLM does not compute embeddings: {tasks.no_pooling}")
        most = tasks.pooler.hidden_size
        if self.dimensions is not None and self.dimensions > most:
            raise InvalidRequest(f"dimensions exceeds the model's {most} ({self.dimensions}); set at most {most}")
        normalize = self.use_activation if self.normalize is None else self.normalize
        return tasks.pooler.pooling(dimensions=self.dimensions, normalize=normalize)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of float32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of values."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Result of one prompt. `prompt` is None if token IDs were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""


@dataclass(slots=True)
class Vector:
    """One vector while it is computed; corresponds to the choices of a generation prompt."""

    token_ids: Sequence[int] = ()
    """Always empty."""
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    values: list[float] = field(default_factory=list)

    def take(self, output: SequenceOutput, now: float) -> bool:
        """Store the only output. Return False, because the engine has ended the sequence."""
        self.finish_reason, self.error = output.finish_reason, output.error or None
        self.num_cached_tokens = output.num_cached_tokens
        if output.pooled is not None:
            self.values = array("f", output.pooled).tolist()
        return False


@dataclass(slots=True)
class PendingEmbedding:
    """One prompt to embed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    add: list[AddRequest]
    choices: list[Vector] = field(default_factory=lambda: [Vector()])

    @property
    def finished(self) -> bool:
        return self.choices[0].finish_reason is not None

    def output(self) -> EmbeddingRequestOutput:
        """Return the result. Raises InvalidRequest if the engine could not compute it."""
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
