"""Interface of a model family: a value that describes how its checkpoints are read and which code computes them, and
the protocol of the built model. Needs no torch, so that facts can be read without it; `build` may import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.multimodal.items import MODALITIES, Modality
from trimtab_engine.weights.gguf_file import GgufNames

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.paged_attention import AttentionMetadata

    from trimtab_engine.device.kv_cache import KVTensors
    from trimtab_engine.layers.moe import MixtureOfExperts
    from trimtab_engine.layers.vocabulary import Placed
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroup, RankGroups
    from trimtab_engine.parallel.shard import ModelShard


class VisionEncoder(Protocol):
    """Computes one image or video at a time, or one tile of it, on one device, or its share of that."""

    vision: VisionConfig
    dtype: "torch.dtype"

    def __call__(self, rows: "torch.Tensor", grid: tuple[int, int, int]) -> "torch.Tensor":
        """rows [num_patches, row_size] float32 -> embeddings [num_tokens, hidden_size] for the language model."""
        ...


class Model(Protocol):
    """One rank's shard of a model with its weights, on one device."""

    pads_rows: bool
    """True if callers should pad the number of rows to a few sizes."""
    is_compiled: bool
    """True if the layers accept metadata for the CPU's compiled operators."""

    @property
    def mixtures(self) -> "Sequence[MixtureOfExperts]":
        """This rank's MoE layers, in the order of their layers."""
        ...

    def forward(
        self,
        token_ids: "torch.Tensor",
        positions: "torch.Tensor",
        kv_cache: "KVTensors",
        metadata: "Sequence[AttentionMetadata]",
        *,
        num_layers: int | None = None,
        placed: "Placed | None" = None,
    ) -> "torch.Tensor":
        """Return hidden states [num_tokens, hidden_size] before the last norm, for token_ids, positions [num_tokens]
        int64. `metadata` has an entry per KV group. If tokens have positions over time, height and width, `positions`
        is [3, num_tokens]. `placed`: embeddings of tokens that are not text, for the first stage.

        `num_layers` limits the layers, for profiling: they all use the same memory. A stage receives hidden states from
        the previous one and sends its own to the next.
        """
        ...

    def receive(self, hidden: "torch.Tensor") -> None:
        """Receive the previous stage's output into hidden [rows, hidden_size]. No-op on the first stage."""
        ...

    def send(self, hidden: "torch.Tensor") -> None:
        """Give hidden to the next stage. The last one sends nothing."""
        ...

    def compute(
        self,
        token_ids: "torch.Tensor",
        positions: "torch.Tensor",
        kv_cache: "KVTensors",
        metadata: "Sequence[AttentionMetadata]",
        *,
        before: "torch.Tensor | None",
        num_layers: int | None = None,
        placed: "Placed | None" = None,
    ) -> "torch.Tensor":
        """Run this stage's layers: the part of `forward` between receiving and sending. `before`: the previous stage's
        hidden states, which are overwritten; the first stage reads token ids only.
        """
        ...

    def logits(self, hidden: "torch.Tensor", rows: "torch.Tensor") -> "torch.Tensor | None":
        """These rows [num_rows] int64 of `forward`'s result -> [num_rows, vocab_size] on the last stage's first rank,
        of any dtype, None elsewhere.

        Every tensor-parallel rank of the last stage must call it, no rank of another stage.
        """
        ...

    def normalised_rows(self, hidden: "torch.Tensor", rows: "torch.Tensor") -> "torch.Tensor":
        """Return the given rows [num_rows] int64 of `forward`'s result after the last norm [num_rows, hidden_size], on
        any rank of the last stage.
        """
        ...


class Build(Protocol):
    """Builder of a rank's model: its layers and heads by `shard`, its weights by `load`."""

    def __call__(self, config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model: ...


def build_decoder(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """The `build` of families that are plain decoders. It is imported when one is built, because it needs torch."""
    from trimtab_engine.models.decoder import Decoder

    return Decoder(config, load, shard, groups)


@dataclass(frozen=True, slots=True)
class VisionEncoderFamily:
    """Vision encoder of a family."""

    parse: Callable[[ConfigReader, ModelConfig], VisionConfig]
    """Reads config.json, for this language model. Raises ModelError."""
    tensors: Callable[[VisionConfig], Tensors]
    """Everything that a checkpoint must hold of it, and nothing else."""
    build: "Callable[[VisionConfig, Loader, RankGroup | None], VisionEncoder]"
    """Its weights whole, or the share of one of the group's ranks, which then compute each item together."""
    modalities: tuple[Modality, ...] = MODALITIES
    """The modalities that it computes."""
    not_on_cuda: str | None = None
    """Reason why it runs on the CPU only; None if it also runs on CUDA where the language model does."""
    renames_tensors: bool = False
    """True if checkpoints may use other tensor names: missing tensors are then found while loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(ModelFamily):
    """One family of models, with the code that computes it."""

    tower: VisionEncoderFamily | None = None
    """The vision encoder; None if images and videos are not supported."""
    not_on_cuda: str | None = None
    """Reason why its layers do not run on CUDA; None if they do, except for unsupported KV groups."""
    build: Build
    renames_tensors: bool = False
    """True if checkpoints may use other tensor names, or store a tensor in parts: missing ones show while loading."""
    gguf_names: Mapping[str, GgufNames] = field(default_factory=dict)
    """Names in GGUF files, by their `general.architecture`."""

    @classmethod
    def of(
        cls,
        family: ModelFamily,
        *,
        build: Build,
        tower: VisionEncoderFamily | None = None,
        gguf_names: Mapping[str, GgufNames] | None = None,
    ) -> "Family":
        """Return the family with the code that computes it."""
        return cls(
            architectures=family.architectures,
            multimodal=family.multimodal,
            parse=family.parse,
            tensors=family.tensors,
            kv=family.kv,
            build=build,
            tower=tower,
            gguf_names=gguf_names or {},
        )
