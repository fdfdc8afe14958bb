"""Tokenizer of a GGUF file, built as in transformers but without torch, which its reader imports."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from trimtab_engine.errors import ModelError

TEMPLATE = "chat_template"
CONFIGURED = {
    TEMPLATE: TEMPLATE,
    "ggml.add_bos_token": "add_bos_token",
    "ggml.add_eos_token": "add_eos_token",
}
OLDER_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""transformers' names of architectures whose GGUF name differs (5.17); others have the same name."""

SPLIT_AS_GPT2 = ("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais")
"""Names of pre-tokenizers that split text as GPT-2 does."""
SPLIT_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split off each digit first: in " 12" both spaces stay together, while GPT-2's joins the second
one with the digits."""

SPECIAL_TOKENS = {
    "bos_token": "ggml.bos_token_id",
    "eos_token": "ggml.eos_token_id",
    "unk_token": "ggml.unknown_token_id",
    "pad_token": "ggml.padding_token_id",
}


def read_gguf_tokenizer(file: Path) -> Any:
    """Return a transformers fast tokenizer.

    Raises:
        ModelError: The file is truncated or not GGUF.
        Exception: transformers' errors for an invalid vocabulary.
    """
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    from trimtab_engine.model_files.gguf_reader import open_gguf

    fields = open_gguf(file).fields
    metadata = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    names, convert = _converter()
    tokenizer, config = (
        {ours: metadata[theirs] for theirs, ours in group.items() if theirs in metadata}
        for group in (names, CONFIGURED)
    )
    if tokenizer.get("tokenizer_type") == "llama":
        config.setdefault("add_bos_token", True)  # older files lack it; llama.cpp adds it
    for name, key in SPECIAL_TOKENS.items():
        if key in metadata:
            config[name] = _token(file, f"tokenizer.{key}", metadata[key], tokenizer["tokens"])
    named = {key.removeprefix(f"{TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{TEMPLATE}.")}
    if named:
        config[TEMPLATE] = {"default": config.get(TEMPLATE), **named}
    _check_split(file, tokenizer)
    architecture = fields["general.architecture"].contents()
    backend, more = convert(architecture, tokenizer)
    if _is_byte_level(tokenizer) and tokenizer.get("pre_tokenizer_type") in SPLIT_DIGITS_FIRST:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**more, **config})  # type: ignore[no-untyped-call]


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    return tokenizer.get("tokenizer_type") == "gpt2"


def _token(file: Path, key: str, value: Any, tokens: list[str]) -> str:
    """Return the token with this ID. Raises ModelError if there is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
        raise ModelError(f"{file}: {key} is {value!r:.60}; must be the id of one of {len(tokens)} tokens")
    return tokens[value]


def _check_split(file: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raise ModelError for a byte-level vocabulary with a pre-tokenizer unknown to transformers, which would use
    GPT-2's and return wrong tokens.
    """
    name = tokenizer.get("pre_tokenizer_type")
    if name is None or not _is_byte_level(tokenizer) or name in (*SPLIT_AS_GPT2, *SPLIT_DIGITS_FIRST):
        return
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:  # transformers 5.17 decides by architecture
        return
    if name not in known:
        raise ModelError(
            f"{file}: pre-tokenizer {name!r} is not supported; set --tokenizer to a folder with the "
            f"model's tokenizer.json"
        )


def _converter() -> tuple[Mapping[str, str], Callable[[str, dict[str, Any]], tuple[Any, dict[str, Any]]]]:
    """Return transformers' tokenizer field names, and its converter function."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    except ImportError:  # transformers 5.17
        older: Any = import_module("transformers.integrations.ggml")
        return older.GGUF_TOKENIZER_MAPPING["tokenizer"], lambda architecture, tokenizer: older.convert_gguf_tokenizer(
            OLDER_NAMES.get(architecture, architecture), tokenizer
        )
    return GGUF_TOKENIZER_MAPPING["tokenizer"], convert_gguf_tokenizer
