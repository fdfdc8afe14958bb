"""The choice of the format of a checkpoint. No torch at import, so that facts need none."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trimtab_engine.errors import ModelError
from trimtab_engine.model_files.json_files import CONFIG_FILE
from trimtab_engine.weights.dummy import DummySource
from trimtab_engine.weights.gguf_file import GgufNames, GgufSource
from trimtab_engine.weights.gguf_parts import first_parts
from trimtab_engine.weights.safetensors_files import SafetensorsSource
from trimtab_engine.weights.source import WeightSource

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:[/?#].*)?")
NAME_ALONE = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.gguf)(?<!\.safetensors)")
"""Pattern of a possible hub name whose organisation was omitted."""
MISTYPED_SCHEME = re.compile(r"(?P<name>hf|s3|oci):/{0,1}(?P<rest>[^/].*)")
OLLAMA_NAME = re.compile(r"[a-z0-9][\w.-]*:[\w.-]+")
ADAPTER_FILE = "adapter_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MODEL_FILES = (CONFIG_FILE, "tokenizer.json", "*.safetensors", "*.gguf", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
"""A folder without any of these is not a model at all, whatever of it is missing."""


def model_path(model: str) -> Path:
    """The local path of `MODEL`: a path or file:// URI. Raises ModelError when nothing is there."""
    if model.startswith("file:"):
        path = Path(unquote(urlsplit(model).path))
    elif "://" in model:
        raise ModelError(not_loaded_from(model))
    else:
        path = Path(model)
    check_is_there(path)
    return path


def not_loaded_from(model: str) -> str:
    """Return the reason why a URI of another scheme is not a supported model, and what to do."""
    page = HUB_PAGE.fullmatch(model)
    if page is not None:
        return f"{model} is a page of the Hugging Face hub; write hf://{page['repo']}"
    if model.startswith(("hf://", "s3://", "oci://")):
        return (
            f"{model}: of these only MODEL is fetched by its name; trimtab-engine fetch {model}, then give the folder"
        )
    if model.startswith("pvc://"):
        return f"{model} is a model for an InferenceDeployment; here give the folder at which the claim is mounted"
    scheme = model.partition("://")[0]
    return (
        f"{model}: models of {scheme}:// are not supported; copy it to this machine and give its folder or .gguf "
        f"file, or name one of the Hugging Face hub, hf://ORG/NAME, of a bucket, s3://BUCKET/PREFIX, or of a registry, "
        f"oci://REGISTRY/REPOSITORY:TAG"
    )


def check_is_there(path: Path) -> None:
    """Raise ModelError, with what to do, if there is no model at the path."""
    if not path.exists():
        remedy = "give the path of a folder with safetensors or of a .gguf file"
        scheme = MISTYPED_SCHEME.fullmatch(str(path))
        if scheme is not None:
            remedy = f"write {scheme['name']}://{scheme['rest']}"
        elif OLLAMA_NAME.fullmatch(str(path)):
            remedy = (
                "names with a tag are Ollama's, whose models are not fetched; give hf://ORG/NAME of the Hugging Face "
                "hub, or a .gguf file"
            )
        elif HUB_NAME.fullmatch(str(path)):
            remedy = (
                f"if that is a name on the Hugging Face hub: of these only MODEL is fetched by its name; "
                f"trimtab-engine fetch {path}, then give the folder that it prints"
            )
        elif NAME_ALONE.fullmatch(str(path)):
            remedy = f"{remedy}; one of the Hugging Face hub is written hf://ORG/NAME, such as hf://ORG/{path}"
        raise ModelError(f"there is no model at {path}; {remedy}")
    if path.is_file() and path.suffix.lower() not in (".gguf", *PICKLE_SUFFIXES):
        raise ModelError(f"model {path}: give a folder with safetensors files, or a .gguf file")
    if path.is_dir() and (path / ADAPTER_FILE).exists() and not (path / CONFIG_FILE).exists():
        raise ModelError(
            f"{path} is an adapter (LoRA), not a model; give its base model, and --enable-lora --lora-modules "
            f"NAME={path}"
        )
    if path.is_dir() and not any(found for pattern in MODEL_FILES for found in path.glob(pattern)):
        raise ModelError(
            f"there is no model in {path}: neither {CONFIG_FILE} with safetensors nor a .gguf file; give the folder "
            f"that holds them"
        )


def open_source(
    model: str, load_format: str = "auto", *, seed: int = 0, gguf_names: Mapping[str, GgufNames]
) -> WeightSource:
    """Open the checkpoint. With load_format auto, safetensors has priority over GGUF; `gguf_names` are those of the
    supported architectures (models/registry.py).

    Raises:
        ModelError: there is no readable checkpoint.
    """
    path = model_path(model)
    if load_format == "dummy":
        return DummySource(path, seed)
    if path.is_file():
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise _pickle_refused(path)
        if path.suffix.lower() != ".gguf" or load_format == "safetensors":
            raise ModelError(f"model {path}: give a folder with safetensors files, or a .gguf file")
        return GgufSource(path, gguf_names)
    has_safetensors = any(path.glob("*.safetensors"))
    ggufs = first_parts(file.name for file in path.glob("*.gguf"))
    if has_safetensors and load_format in ("auto", "safetensors"):
        return SafetensorsSource(path)
    if ggufs and load_format in ("auto", "gguf"):
        if len(ggufs) > 1:
            raise ModelError(f"model {path}: holds {len(ggufs)} GGUF files ({', '.join(ggufs)}); name one of them")
        return GgufSource(path / ggufs[0], gguf_names)
    pickles = sorted(p for suffix in PICKLE_SUFFIXES for p in path.glob("*" + suffix))
    if pickles:
        raise _pickle_refused(pickles[0])
    wanted = "safetensors or GGUF" if load_format == "auto" else load_format
    raise ModelError(f"model {path}: no {wanted} file in it; use --load-format dummy to run without weights")


def _pickle_refused(path: Path) -> ModelError:
    return ModelError(
        f"model {path}: pickle formats ({', '.join(PICKLE_SUFFIXES)}) can run code and are never loaded; "
        f"convert the checkpoint to safetensors"
    )
