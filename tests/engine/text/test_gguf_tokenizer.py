"""A GGUF file's tokenizer equals that of the source folder, and that of transformers' reader."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from trimtab_engine.errors import ModelError
from trimtab_engine.text.tokenizer import Tokenizer

CONTROL, NORMAL = 3, 1  # gguf's token types
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

SPLIT_DIGITS_FIRST = {
    "  12": ["ĠĠ", "1", "2"],
    "x = 1": ["x", "Ġ", "=", "Ġ", "1"],
    "\n\n1": ["ĊĊ", "1"],
    "\n  1\n\n 1": ["Ċ", "ĠĠ", "1", "ĊĊ", "Ġ", "1"],
    "    1   1": ["ĠĠ", "ĠĠ", "1", "ĠĠ", "Ġ", "1"],
    "  ab": ["Ġ", "Ġ", "ab"],
    "1  ": ["1", "ĠĠ"],
    "\u0663\u00bd": ["Ù", "£", "Â", "½"],
}
"""Text, and its tokens if every digit is split off first."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file shared by all tests, not modified."""
    return write_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_file(
    path: Path, split: str = "gpt-2", template: str | dict[str, str] = TEMPLATE, end: int = 0, **options: Any
) -> Path:
    """Write byte-level tokens, four merges, one control token, a chat template or several by name, and two small
    tensors.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, "ab", "ĠĠ", "ĊĊ", "Ġ1"]
    writer = GGUFWriter(path, "llama", **options)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL, *[NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["a b", "Ġ Ġ", "Ċ Ċ", "Ġ 1"])
    writer.add_eos_token_id(end)
    writer.add_chat_template(
        template if isinstance(template, str) else [{"name": name, "template": text} for name, text in template.items()]
    )
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((len(tokens), 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_text_round_trips_through_tokens(file: Path) -> None:
    tokenizer = Tokenizer(str(file))
    ids = tokenizer.encode("ab ä<|end|>")
    assert (ids[0], ids[-1], len(ids)) == (257, 0, 5)  # the merge, a space, two bytes of ä, the control token
    assert tokenizer.fast.decode(ids) == "ab ä"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


def test_folder_with_one_gguf_file_equals_the_file(file: Path) -> None:
    assert Tokenizer(str(file.parent)).fast.to_str() == Tokenizer(str(file)).fast.to_str()


def test_tokenizer_equals_transformers_reader(file: Path) -> None:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    assert Tokenizer(str(file)).fast.to_str() == theirs.backend_tokenizer.to_str()


def test_truncated_file_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"short\.gguf: is truncated or no GGUF file.*download the file again"):
        Tokenizer(str(tmp_path / "short.gguf"))


def test_gguf_tokenizer_imports_no_torch(file: Path) -> None:
    code = (
        f"import sys; from trimtab_engine.text.tokenizer import Tokenizer; Tokenizer({str(file)!r}); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_first_part_of_split_model_has_the_tokenizer(file: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf", split_max_tensors=1)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert second.name == "model-00002-of-00002.gguf"
    for place in (first, tmp_path):
        assert Tokenizer(str(place)).fast.to_str() == Tokenizer(str(file)).fast.to_str()


def test_templates_have_their_names(tmp_path: Path) -> None:
    templates = Tokenizer(
        str(write_file(tmp_path / "m.gguf", template={"default": "a", "tool_use": "b"}))
    ).chat_templates
    assert templates.text(with_tools=False) == "a"
    assert templates.text(with_tools=True) == "b"


@pytest.mark.parametrize("split", ["llama-bpe", "qwen2", "tekken", "default"])
def test_pre_tokenizers_of_supported_families_are_known(tmp_path: Path, split: str) -> None:
    assert Tokenizer(str(write_file(tmp_path / "m.gguf", split))).encode("ab")[-1] == 257


@pytest.mark.parametrize("split", ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"])
def test_split_digits_keep_preceding_blanks_together(tmp_path: Path, split: str) -> None:
    tokenizer = Tokenizer(str(write_file(tmp_path / "m.gguf", split)))
    for text, pieces in SPLIT_DIGITS_FIRST.items():
        ids = tokenizer.encode(text)
        assert [tokenizer.token_name(token) for token in ids] == pieces
        assert tokenizer.fast.decode(ids) == text


def test_unsplit_digits_take_the_preceding_blank(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_file(tmp_path / "m.gguf", "gpt-2")))
    assert [tokenizer.token_name(token) for token in tokenizer.encode("  12")] == ["Ġ", "Ġ1", "2"]


@pytest.mark.parametrize("end", [261, 2**32 - 1])
def test_invalid_special_token_is_named_with_file_and_key(tmp_path: Path, end: int) -> None:
    message = rf"m\.gguf: tokenizer\.ggml\.eos_token_id is {end}; must be the id of one of 261 tokens"
    with pytest.raises(ModelError, match=message):
        Tokenizer(str(write_file(tmp_path / "m.gguf", end=end)))


def test_unknown_pre_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: pre-tokenizer 'deepseek-coder' is not.*--tokenizer to a folder"):
        Tokenizer(str(write_file(tmp_path / "m.gguf", "deepseek-coder")))
