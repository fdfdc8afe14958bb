"""The tokenizer inside a GGUF file, built as transformers builds it but without torch, which its reader imports."""

from pathlib import Path
from typing import Any

from trimtab_engine.errors import ModelError

SPECIAL_TOKENS = {
    "bos_token": "ggml.bos_token_id",
    "eos_token": "ggml.eos_token_id",
    "unk_token": "ggml.unknown_token_id",
    "pad_token": "ggml.padding_token_id",
}


def read_gguf_tokenizer(file: Path) -> Any:
    """A transformers fast tokenizer. Raises ModelError for a file that is cut or is none, and what transformers raises
    for a vocabulary that it cannot read."""
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    try:
        fields = GGUFReader(file).fields
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{file}: is truncated or no GGUF file: {reason}; download the file again") from None
    metadata = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    tokenizer, config = (
        {ours: metadata[theirs] for theirs, ours in GGUF_TOKENIZER_MAPPING[group].items() if theirs in metadata}
        for group in ("tokenizer", "tokenizer_config")
    )
    if tokenizer.get("tokenizer_type") == "llama":
        config.setdefault("add_bos_token", True)  # older files do not say; llama.cpp adds it
    for name, key in SPECIAL_TOKENS.items():
        if key in metadata:
            config[name] = tokenizer["tokens"][metadata[key]]
    architecture = fields["general.architecture"].contents()
    backend, _ = convert_gguf_tokenizer(architecture, tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)  # type: ignore[no-untyped-call]
