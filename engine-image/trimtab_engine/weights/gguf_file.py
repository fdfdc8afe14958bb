"""A GGUF file, or several parts of one model: blocks of 4 to 8 bits as stored, or dequantised to float32 while reading.
The configuration is read from the metadata (gguf_metadata.py).

llama.cpp stores the q and k projections of some architectures with adjacent rotary pairs; `tensor` undoes that, so that
both formats have the same tensors (transformers pairs element i with i + head_size / 2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_engine.errors import ModelError, one_line
from trimtab_engine.weights.gguf_metadata import (
    COUNT,
    TEXT,
    Metadata,
    Need,
    checked,
    decoder_words,
    end_tokens,
    pooling_type,
)
from trimtab_engine.weights.gguf_parts import parts_of
from trimtab_engine.weights.packing import Packing
from trimtab_engine.weights.source import Span

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.native.quantised import QuantisedBlocks

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
"""Unquantised tensor types; all others are quantised."""
ROPE_FREQUENCIES = "rope_freqs.weight"
"""A divisor for each frequency of the rope: what Llama 3.1's scaling makes of it."""
SPLIT_COUNT, SPLIT_TENSORS = "split.count", "split.tensors.count"
TOWER_KIND = "clip"  # the architecture of files with the vision encoder of a model that sees images, mmproj-….gguf


def _nothing_more(metadata: Metadata) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufNames:
    """llama.cpp's tensor names of an architecture, by transformers' names. `layers`: suffixes after the layer's number.
    `has_adjacent_pairs`: rows of q and k are stored with adjacent rotary pairs.
    """

    architecture: str
    layers: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    has_adjacent_pairs: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors with a projection of all experts of a layer, and the name of one expert's."""
    norm_offset: float = 0.0
    """Constant that llama.cpp has added to norm weights."""
    words: Callable[[Metadata], Mapping[str, Any]] = _nothing_more
    """Reads architecture-specific metadata into config.json's fields."""


class GgufSource:
    """Tensors by their transformers names."""

    format = "gguf"

    def __init__(self, file: Path, names: Mapping[str, GgufNames]) -> None:
        """`file`: of a model in parts the first. `names`: of the architectures that are built, by what
        `general.architecture` calls them.
        """
        self._files = _all_parts(file)
        self.where = str(self._files[0])
        parts = [_read_part(part) for part in self._files]
        self._fields = parts[0].fields
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        self._check_parts(len(tensors))
        kind = str(self._value("general.architecture", TEXT))
        if kind not in names:
            raise ModelError(f"{self.where}: {_not_built(kind, names)}")
        self._kind, self._names = kind, names[kind]
        self._metadata = Metadata(self._fields, kind, self.where)
        if self._metadata.number("expert_count", 0, COUNT) and not self._names.experts:
            raise ModelError(f"{self.where}: MoE models in GGUF architecture {kind} are not supported")
        self._divisors = self._numbers(tensors.pop(ROPE_FREQUENCIES)) if ROPE_FREQUENCIES in tensors else []
        self._tensors = {
            ours: held for name, tensor in tensors.items() for ours, held in self._in_our_words(name, tensor).items()
        }
        self._shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    @property
    def stored_types(self) -> tuple[str, ...]:
        """llama.cpp's names of the types that the tensors have in the file, the one with the most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = str(tensor.tensor_type.name)
            sizes[name] = sizes.get(name, 0) + int(tensor.n_bytes)
        return tuple(sorted(sizes, key=lambda name: -sizes[name]))

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The tokenizer's tokens that end an answer."""
        ends = end_tokens(self._fields, self.where)
        return {"eos_token_id": ends} if ends else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Metadata in config.json's words. Raises ModelError when a needed key is absent."""
        return {
            "architectures": [self._names.architecture],
            **decoder_words(self._metadata, self._divisors),
            "vocab_size": int(self._stored("model.embed_tokens.weight").shape[-1]),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self._tensors,
            **self._names.words(self._metadata),
        }

    @property
    def pooling_type(self) -> str | None:
        """Return the pooling method of embedding models.

        Raises:
            ModelError: the method is unknown.
        """
        return pooling_type(self._metadata)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF writes the fastest dimension first; here it is last, as in torch."""
        return self._shapes

    def map_files(self) -> None:
        """The reader has mapped the file."""

    def quantised_type(self, name: str) -> str | None:
        """llama.cpp's name of the type of a tensor that is quantised."""
        kind = str(self._stored(name).tensor_type.name)
        return None if kind in PLAIN_TYPES else kind

    def packing(self, name: str, columns: Span | None = None) -> Packing | None:
        """Return the packing with which these columns of a tensor are multiplied as stored, or None."""
        from trimtab_kernels.native.quantised import BLOCK_FORMATS

        form = BLOCK_FORMATS.get(self._tensors[name].tensor_type.name)
        if form is None or any(column % form.numbers for column in columns or ()):
            return None
        return Packing(form.name, form.packed_bytes / form.numbers)

    def blocks(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "QuantisedBlocks | None":
        """A matrix as it is stored, or a part of it, a view of the file where rows keep their order. None where it is
        not multiplied so, or columns cut a block.
        """
        import torch
        from trimtab_kernels.native.quantised import BLOCK_FORMATS, QuantisedBlocks

        tensor = self._stored(name)
        form = BLOCK_FORMATS.get(tensor.tensor_type.name)
        if form is None or (columns is not None and any(column % form.numbers for column in columns)):
            return None
        data = torch.from_numpy(tensor.data if rows is None else tensor.data[rows[0] : rows[1]])
        data = self._in_halves(name, data)
        if columns is not None:
            first, last = (column // form.numbers * form.block_bytes for column in columns)
            data = data[:, first:last]
        return QuantisedBlocks(form, data)

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """Dequantised to float32. Of a part only the rows are dequantised."""
        import torch
        from gguf.quants import dequantize

        tensor = self._stored(name)
        data = tensor.data if rows is None else tensor.data[rows[0] : rows[1]]
        shape = self.shapes()[name]
        if rows is not None:
            shape = (rows[1] - rows[0], *shape[1:])
        try:
            values = torch.tensor(dequantize(data, tensor.tensor_type))  # a copy, in memory that torch counts
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self.where}: tensor {name} is {kind}, which cannot be dequantised: {error}") from None
        values = self._in_halves(name, values.view(shape).float())
        if name.endswith("norm.weight"):
            values -= self._names.norm_offset
        return values if columns is None else values[:, columns[0] : columns[1]]

    def _numbers(self, tensor: Any) -> list[float]:
        """Return the values of a small tensor in float32."""
        if tensor.tensor_type.name != "F32":
            raise ModelError(f"{self.where}: tensor {tensor.name} is {tensor.tensor_type.name}; F32 is needed")
        numbers: list[float] = tensor.data.ravel().tolist()
        return numbers

    def _value(self, name: str, need: Need) -> Any:
        """Return a value of the file's metadata, or None if it is absent.

        Raises:
            ModelError: the value is invalid.
        """
        return checked(self._fields.get(name), name, need, self.where)

    def _check_parts(self, num_tensors: int) -> None:
        """Raise ModelError if a part of a split model has an unexpected file name, or tensors are missing."""
        count = int(self._value(SPLIT_COUNT, COUNT) or 1)
        if count != len(self._files):
            raise ModelError(
                f"{self.where}: is one of {count} parts of a model; name them …-00001-of-{count:05}.gguf "
                f"and so on, in one folder"
            )
        expected = int(self._value(SPLIT_TENSORS, COUNT) or num_tensors)
        if num_tensors != expected:
            raise ModelError(f"{self.where}: its parts have {num_tensors} tensors of {expected}; download them again")

    def _stored(self, name: str) -> Any:
        """The reader's tensor. Raises ModelError."""
        if name not in self._tensors:
            raise ModelError(f"{self.where}: tensor {name} is missing")
        return self._tensors[name]

    def _in_halves(self, name: str, rows: "torch.Tensor") -> "torch.Tensor":
        """Return rows of q and k in transformers' order, for any row format; other tensors unchanged."""
        if self._names.has_adjacent_pairs and name.split(".")[-2] in ("q_proj", "k_proj"):
            return halves_from_pairs(rows, rows.shape[0] // int(self.config["head_dim"]))
        return rows

    def _in_our_words(self, name: str, tensor: Any) -> dict[str, Any]:
        """Return the tensor under transformers' name, or the tensors of its experts.

        Raises:
            ModelError: the name is unknown.
        """
        if name in GLOBAL_NAMES:
            return {GLOBAL_NAMES[name]: tensor}
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk":
            prefix, suffix = f"model.layers.{parts[1]}.", f".{parts[3]}"
            if parts[2] in self._names.layers:
                return {prefix + self._names.layers[parts[2]] + suffix: tensor}
            if parts[2] in self._names.experts and len(tensor.shape) == 3:
                ours = prefix + self._names.experts[parts[2]] + suffix
                return {ours.format(expert): held for expert, held in enumerate(_one_by_one(tensor))}
        raise ModelError(f"{self.where}: tensor {name} is none that GGUF architecture {self._kind} is built with")


def _one_by_one(tensor: Any) -> Sequence[Any]:
    """The experts of a tensor [experts, rows, columns]: llama.cpp names the last dimension first."""
    count = len(tensor.data)
    return [
        tensor._replace(
            data=data, shape=tensor.shape[:-1], n_elements=tensor.n_elements // count, n_bytes=tensor.n_bytes // count
        )
        for data in tensor.data
    ]


def halves_from_pairs(rows: "torch.Tensor", num_heads: int) -> "torch.Tensor":
    """Undo llama.cpp's permutation of q and k: rows (2i, 2i+1) of a head become (i, i + head_size/2)."""
    half = rows.shape[0] // num_heads // 2
    return rows.view(num_heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class _Part:
    """One opened file: its metadata, and its tensors by llama.cpp's names."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]


def _all_parts(file: Path) -> Sequence[Path]:
    """The file, and the others where it is the first of several. Raises ModelError where it is another of them, or one
    is missing.
    """
    files = [file.with_name(name) for name in parts_of(file.name)]
    if files[0] != file:
        raise ModelError(f"{file}: is one of {len(files)} parts of a model; give the first, {files[0].name}")
    missing = [part.name for part in files if not part.exists()]
    if missing:
        raise ModelError(
            f"{file}: is one of {len(files)} parts of a model, and {missing[0]} is missing; all of them are needed"
        )
    return files


def _read_part(file: Path) -> _Part:
    """Raises ModelError for a file that is cut, is none, or was written for another kind of machine."""
    from gguf import GGUFEndian

    from trimtab_engine.model_files.gguf_reader import DAMAGE, open_gguf

    reader = open_gguf(file)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items() if _is_read(name)}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    except DAMAGE as error:
        raise ModelError(f"{file}: is truncated or no GGUF file: {one_line(error)[:200]}") from None
    if reader.endianess is GGUFEndian.BIG:
        raise ModelError(
            f"{file}: is in big-endian byte order, which is not supported; give the little-endian file, as most are, "
            f"or "
            f"convert it in place: gguf-convert-endian {file} little"
        )
    size = file.stat().st_size
    end = max((int(t.data_offset) + int(t.n_bytes) for t in tensors.values()), default=0)
    if end > size or not (tensors or SPLIT_COUNT in fields):
        raise ModelError(f"{file}: is truncated: {size} bytes of {end}; download the file again")
    return _Part(fields, tensors)


def _is_read(name: str) -> bool:
    """Return True if the reader needs a field: of the tokenizer, which is large, only the ids of special tokens."""
    return "tokenizer" not in name or name.endswith("_token_id")


def _not_built(kind: str, names: Mapping[str, GgufNames]) -> str:
    if kind == TOWER_KIND:
        return "is a separate vision encoder, which is not supported for GGUF; give the file of the model itself"
    return f"GGUF architecture {kind} is not supported; supported: {', '.join(names)}; others are read from safetensors"
