"""A folder with safetensors files. Headers are checked against the file sizes before anything is read, so that a
truncated download is one clear line and not a crash later.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab_engine.errors import ModelError
from trimtab_engine.model_files.json_files import CONFIG_FILE, GENERATION_FILE, LFS_POINTER, read_json
from trimtab_engine.weights.read_ahead import ReadAhead
from trimtab_engine.weights.source import DAMAGE, Span

if TYPE_CHECKING:
    import torch

COMPARED_BYTES = 1 << 20  # per read; tensors that differ usually do so in the first one
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1}
LOADABLE = ("F32", "F16", "BF16", "F8_E4M3")
INTEGERS: Mapping[str, tuple[str, ...]] = {
    "I32": (".qweight", ".qzeros", "g_idx", ".weight_packed", ".weight_zero_point", ".weight_shape"),
    "I64": (".weight_shape",),
    "I8": (".weight", "_zero_point"),
    "U8": ("_blocks", "_scales"),
}
"""Name suffixes of integer tensors by dtype (weights/four_bits.py, scaled.py, mxfp4.py)."""
MODELOPT_FILE = "hf_quant_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource:
    """Tensors by name, from one file or the files of an index."""

    format = "safetensors"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: Mapping[str, Any] = _with_modelopt(folder, read_json(folder / CONFIG_FILE))
        self.generation_config: Mapping[str, Any] = read_json(folder / GENERATION_FILE, required=False)
        self.where = str(folder / CONFIG_FILE)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(folder):
            for name, entry in read_header(file).items():
                self._file_of[name] = file
                self._shapes[name] = tuple(entry["shape"])
        self._open: dict[Path, Any] = {}
        self._ahead: ReadAhead | None = None
        """None if nothing announced a full read."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """Return a read-only view of the memory-mapped file; a part is read by itself."""
        from safetensors import SafetensorError

        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"model {self._folder}: tensor {name} is missing from the safetensors files")
        if self._ahead is not None:
            self._ahead.wanted(name)
        try:
            opened = self._opened(file)
            tensor: torch.Tensor
            if rows is None and columns is None:
                tensor = opened.get_tensor(name)
            elif columns is None:
                tensor = opened.get_slice(name)[_slice(rows)]
            else:
                tensor = opened.get_slice(name)[_slice(rows), _slice(columns)]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from None
        return tensor

    def has_equal_bytes(self, first: str, second: str) -> bool:
        """Return True if two tensors are stored with the same dtype, shape and values. Needs no torch."""
        files = [self._file_of[name] for name in (first, second)]
        starts, entries = [], []
        for file, name in zip(files, (first, second), strict=True):
            entry = read_header(file)[name]
            entries.append(entry)
            starts.append(_data_start(file) + entry["data_offsets"][0])
        if any(entries[0][key] != entries[1][key] for key in ("dtype", "shape")):
            return False
        left = entries[0]["data_offsets"][1] - entries[0]["data_offsets"][0]
        with files[0].open("rb") as one, files[1].open("rb") as other:
            one.seek(starts[0])
            other.seek(starts[1])
            while left > 0:
                size = min(left, COMPARED_BYTES)
                if one.read(size) != other.read(size):
                    return False
                left -= size
        return True

    def map_files(self) -> None:
        """All of them; torch counts a mapped file like memory that it allocates. From now on the disk reads ahead."""
        from safetensors import SafetensorError

        files = list(dict.fromkeys(self._file_of.values()))
        self._ahead = ReadAhead({file: read_header(file) for file in files})
        for file in files:
            try:
                self._opened(file)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: cannot be read: {error}") from None

    def _opened(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def _with_modelopt(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json, completed with ModelOpt's separate file if config.json has no quantisation."""
    said = read_json(folder / MODELOPT_FILE, required=False).get("quantization")
    if config.get("quantization_config") is not None or not isinstance(said, Mapping):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **said}}


def _slice(span: Span | None) -> slice:
    return slice(None) if span is None else slice(*span)


def _files(folder: Path) -> list[Path]:
    """The weight files: the single one, else the index's, else all. transformers uses the same order, because tools
    that merge shards leave the index behind.
    """
    single = folder / SINGLE_FILE
    if single.exists():
        return [single]
    index = folder / INDEX_FILE
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index}: has no weight_map")
    files = []
    for name in sorted({str(value) for value in names.values()}):
        file = folder / name
        if file.parent != folder or not file.exists():
            raise ModelError(f"{index}: names {name}, which is not in {folder}")
        files.append(file)
    return files


def read_header(file: Path) -> dict[str, Any]:
    """{tensor name: {dtype, shape, data_offsets}} of one file, checked against its size. Raises ModelError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            raw = stream.read(length) if 2 <= length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    if head == LFS_POINTER[:8]:
        raise ModelError(f"{file}: is a Git LFS pointer, not the file; run `git lfs pull` in {file.parent}")
    if len(raw) != length or not raw:
        raise ModelError(f"{file}: is truncated or no safetensors file ({size} bytes, header not complete)")
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [_check_entry(file, name, entry) for name, entry in entries.items()]
    except DAMAGE:
        raise ModelError(f"{file}: the safetensors header is damaged; download the file again") from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError(f"{file}: is truncated: {size} bytes of {needed}; download the file again")
    return entries


def _data_start(file: Path) -> int:
    """Return the offset of the first tensor in a file whose header was read before."""
    with file.open("rb") as stream:
        return 8 + int(struct.unpack("<Q", stream.read(8))[0])


def _check_entry(file: Path, name: str, entry: dict[str, Any]) -> int:
    """The tensor's end offset. Raises ModelError for a dtype that is not loaded, ValueError for nonsense."""
    dtype, (first, last) = entry["dtype"], entry["data_offsets"]
    if dtype not in LOADABLE and not name.endswith(INTEGERS.get(dtype, ())):
        raise ModelError(f"{file}: tensor {name} is {dtype}; only {', '.join(LOADABLE)} can be loaded")
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(name)
    count = math.prod(shape)
    if last - first != count * ITEM_BYTES[dtype] or first < 0:
        raise ValueError(name)
    return int(last)
