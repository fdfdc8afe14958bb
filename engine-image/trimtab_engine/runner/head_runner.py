"""Runner of a draft head: weights, its part of the KV cache, hidden states and logits. One CPU rank holds all of it. It
does not decide what is drafted for which request.
"""

from collections.abc import Callable

import torch
from trimtab_kernels.paged_attention import build_attention_metadata, max_decode_tokens, plan_cpu_reads
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import groups_of
from trimtab_modelspec.quantization import stored_quantization

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVCache, KVLayers, KVTensors
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.layers.linear import padded_rows, row_sizes
from trimtab_engine.memory.reserved import cpu_activation_bytes
from trimtab_engine.models.checkpoint import check_head
from trimtab_engine.models.decoder import Decoder
from trimtab_engine.models.draft_head import DraftHead, HeadKind
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import open_model
from trimtab_engine.runner.model_runner import DTYPES, ModelRunner, dummy_sequences, envelope_spans
from trimtab_engine.runner.weights import WeightsUnavailable
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.step_inputs import StepInputs, flatten, in_token_order
from trimtab_engine.weights.dummy import DummySource
from trimtab_engine.weights.source import WeightSource

GREEDY = Sampling(temperature=0.0)


class HeadRunner:
    """`target` is the model that it belongs to. Start-up order: load → profile → use_draft_layers_of."""

    _kv_tensors: KVTensors
    can_drop_weights = True

    def __init__(
        self, config: ModelConfig, build: Callable[[], DraftHead], kind: HeadKind, target: ModelRunner, device: Device
    ) -> None:
        self._build, self._device, self._target = build, device, target
        with device.measure() as growth:
            self._head = build()
        self.weights_bytes = max(0, growth.kept)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        (group,) = groups_of(kind.kv(config))
        self.kv_layers = KVLayers(group, target.kv_dtype)
        """KV cache layers of the head."""
        self._num_heads = config.num_attention_heads
        self._block_size = target.block_size

    @classmethod
    def load(cls, path: str, kind: HeadKind, config: EngineConfig, target: ModelRunner, device: Device) -> "HeadRunner":
        """Read the head's weights. Raises ModelError, ConfigError where it is another model's, NotSupportedError."""

        def open_head() -> tuple[WeightSource, ModelConfig]:
            source = open_model(path, "dummy" if config.load_format == "dummy" else "auto", seed=config.seed)
            model_config = kind.parse(source, target.facts.whole)
            shapes = {name: tensor.shape for name, tensor in kind.tensors(model_config).items()}
            if isinstance(source, DummySource):
                source.expect(shapes)
                return source, model_config
            own = kind.source(source, model_config)
            check_head(shapes, own)
            return own, model_config

        def build() -> DraftHead:
            source, model_config = open_head()
            source.map_files()
            quantization = stored_quantization(source.config, source.where)
            dtype = DTYPES[target.facts.dtype]
            with torch.inference_mode():
                load = Loader(source, dtype, device.torch, lambda count: None, quantization)
                return kind.build(model_config, load, decoder_of(target))

        return cls(open_head()[1], build, kind, target, device)

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Run the largest steps once. Return their memory in bytes, including the hidden states that the target keeps
        for them.
        """
        scratch = KVCache(layers=self.kv_layers, cap_blocks=1, block_size=self._block_size, memory=self._device.scratch)
        scratch.map_blocks(1)
        self._kv_tensors = scratch
        max_len = self._target.facts.max_model_len
        sizes = row_sizes() if self._head.pads_rows else []
        with self._device.measure() as growth:
            for spans in (envelope_spans(max_num_batched_tokens, max_len), [(0, 1)] * max_num_seqs):
                inputs = self.flatten(dummy_sequences(spans, GREEDY, self._block_size))
                rows = self.padded(len(inputs.token_ids))
                hidden = self.run(inputs, torch.zeros(rows, self.hidden_size, dtype=self._dtype))
                self.logits(hidden[: min(rows, max_num_seqs)])
        return cpu_activation_bytes(growth.peak, len(sizes))

    @property
    def kept_row_bytes(self) -> int:
        """Bytes kept per running request besides keys and values: the head's newest row."""
        return self.hidden_size * self._dtype.itemsize

    @property
    def kv_rounding_bytes(self) -> int:
        """Bytes that pages of KV cache memory may take beyond its blocks."""
        return self._device.kv_rounding_bytes(self.kv_layers.num_regions)

    def use_draft_layers_of(self, kv_cache: KVCache) -> None:
        """Keep keys and values in the draft's part of the target's KV cache."""
        self._kv_tensors = kv_cache.draft

    def drop_weights(self) -> None:
        """Give the weights' memory back. Nothing runs until reload_weights()."""
        del self._head
        self._device.after_weights()

    def reload_weights(self) -> None:
        """Read the weights again, after the target's, whose embeddings are shared.

        Raises:
            WeightsUnavailable: If the checkpoint cannot be read, or the device has no room.
        """
        failure: WeightsUnavailable | None = None
        try:
            self._head = self._build()
        except Exception as error:
            failure = WeightsUnavailable.because(error)
        if failure is not None:  # the error is released, and with its frames the tensors
            self._device.after_weights()
            raise failure

    def flatten(self, sequences: list[ScheduledSequence]) -> StepInputs:
        """Return positions and block tables of sequences, in token_order(). The caller fills in token ids."""
        longest = max_decode_tokens(self._device.torch)
        return flatten(sequences, block_size=self._block_size, max_decode_tokens=longest)[0]

    def token_order(self, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the token order of these sequences in a step, here and in the target."""
        return in_token_order(sequences, max_decode_tokens=max_decode_tokens(self._device.torch))

    @torch.inference_mode()
    def run(self, inputs: StepInputs, before: torch.Tensor) -> torch.Tensor:
        """Compute a step. Token ids are those after the tokens whose positions and hidden states are given. `before`
        [rows, hidden_size] may end with padding rows. Return hidden states, as many rows.
        """
        padding = [0] * (before.shape[0] - len(inputs.token_ids))
        own, device = inputs.groups[0], self._device.torch
        keys = self._kv_tensors.keys[0]
        metadata = build_attention_metadata(
            own.slots(self._block_size),
            own.decodes,
            own.chunks,
            block_size=self._block_size,
            device=device,
            is_native=False,
        )
        return self._head.forward(
            torch.tensor(inputs.token_ids + padding, dtype=torch.int64, device=device),
            torch.tensor(inputs.positions + padding, dtype=torch.int64, device=device),
            before,
            self._kv_tensors,
            plan_cpu_reads(metadata, self._num_heads, keys),
        )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Some rows of run()'s result -> [rows, vocab_size] float32."""
        rows = hidden.shape[0]
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, self.padded(rows) - rows))
        return self._head.logits(padded)[:rows]

    def padded(self, rows: int) -> int:
        """Return the number of rows to compute for `rows` rows."""
        return padded_rows(rows) if self._head.pads_rows and rows else rows

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._target.facts.dtype]


def decoder_of(target: ModelRunner) -> Decoder:
    """Return the runner's decoder.

    Raises:
        NotSupportedError: If the model runs on transformers' code.
    """
    if not isinstance(target.model, Decoder):
        raise NotSupportedError(
            f"--speculative-config: draft heads are not supported for {target.facts.whole.architecture}, "
            f"which runs on transformers' own code; use ngram or draft_model"
        )
    return target.model
