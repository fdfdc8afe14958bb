"""Incremental text equals the complete text and never has an incomplete character; no torch import."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_benchmarks.detokenising_bench import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per byte, in the order of the byte-level alphabet; then <|end|>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(str(folder))


@given(text=st.text(max_size=30))
def test_incremental_text_has_no_incomplete_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "replace").decode().replace("�", "?")
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
    assert all("�" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


@given(ids=st.lists(st.integers(0, 256), max_size=40), skip=st.booleans())
def test_incremental_text_equals_decoding_at_once(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.fast.decode(ids, skip_special_tokens=skip)


@given(runs=st.lists(st.lists(st.integers(0, 256), max_size=6), max_size=8), skip=st.booleans())
def test_texts_of_byte_level_runs_equal_the_library(tokenizer: Tokenizer, runs: list[list[int]], skip: bool) -> None:
    detokenizer, stream = Detokenizer(tokenizer, skip_special_tokens=skip), DecodeStream(skip_special_tokens=skip)
    assert tokenizer.token_texts(skip_special_tokens=skip) is not None
    for run in runs:
        assert detokenizer.push_each(run) == [stream.step(tokenizer.fast, token_id) or "" for token_id in run]


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece byte fallback, as in Llama 2: id = byte for single bytes, then a few pieces."""
    folder = tmp_path_factory.mktemp("byte-fallback")
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258, "é": 259}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(str(folder))


@given(ids=st.lists(st.integers(0, 259), max_size=20))
def test_invalid_bytes_do_not_fail(byte_fallback: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(byte_fallback, skip_special_tokens=True)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    # A byte next to invalid ones may be lost, as in the library's own decoding; a piece of text never is.
    assert ids.count(257) <= text.count("b") <= ids.count(257) + ids.count(ord("b"))
    assert text.count("a") >= ids.count(256)


def test_characters_after_invalid_bytes_are_complete(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback, skip_special_tokens=True)
    ids = [256, 0xE2, 257, 256, *"日".encode(), 256]
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces).endswith("b a日 a")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_token_bytes_of_byte_level_tokens_decode_to_their_text(tokenizer: Tokenizer) -> None:
    for token_id in range(257):
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == tokenizer.token_text(token_id)
    assert sorted(map(tokenizer.token_bytes, range(256))) == [bytes([byte]) for byte in range(256)]
    (end,) = tokenizer.encode("<|end|>")
    assert tokenizer.token_bytes(end) == b"<|end|>"


def test_token_bytes_of_sentencepiece_keep_blanks_and_bytes(byte_fallback: Tokenizer) -> None:
    assert [byte_fallback.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [byte_fallback.token_bytes(token_id) for token_id in (256, 257, 258, 259)] == [
        b" a",
        b"b",
        b" ",
        "é".encode(),
    ]


def test_token_bytes_of_an_unknown_id_are_empty(tokenizer: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert tokenizer.token_bytes(1000) == byte_fallback.token_bytes(1000) == b""


def test_special_tokens_are_text_only_if_requested(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|end|>")
    assert Detokenizer(tokenizer, skip_special_tokens=True).push(end) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(end) == "<|end|>"


def test_lone_surrogate_becomes_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800") == tokenizer.encode("a�")


def test_chat_template_is_the_models_own(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "user:hi;>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "user:hi;"


def test_rejecting_or_escaping_template_is_invalid_request(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for template in ("{{ raise_exception('no') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(InvalidRequest):
            Tokenizer(str(tmp_path)).render_chat([{"role": "user", "content": "hi"}])


def test_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read the tokenizer of"):
        Tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.model": "x"}, "tokenizer.model is not supported; create tokenizer.json with transformers"),
        ({"vocab.json": "{}", "merges.txt": ""}, "vocab.json is not supported"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, "tokenizer.json is a Git LFS pointer"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "null"}, "tokenizer_config.json is not a JSON object"),
        ({"tokenizer.json": "{}"}, "KeyError: "),  # the library's text, with the exception type
    ],
)
def test_invalid_tokenizer_error_names_file_and_remedy(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match="set --tokenizer to a folder with one") as refused:
        Tokenizer(str(tmp_path))
    assert str(tmp_path) in str(refused.value)
    assert reason in str(refused.value)


def test_tokenizer_path_error_names_its_kind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it is a file"):
        Tokenizer(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="no such folder"):
        Tokenizer(str(tmp_path / "absent"))


def test_tokenizer_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from trimtab_engine.text.tokenizer import Tokenizer; "
        f"Tokenizer({str(folder)!r}); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_huge_chat_template_is_rejected(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("x" * (1 << 21))
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer(str(tmp_path))


async def test_long_texts_give_the_same_tokens(tokenizer: Tokenizer) -> None:
    text = "word " * 2000
    assert await tokenizer.encode_async(text) == tokenizer.encode(text)


def test_blank_before_first_output_word_is_kept(tmp_path: Path) -> None:
    llama = sentencepiece(tmp_path / "folder", "llama")
    prompt, answer = (llama.fast.token_to_id(piece) for piece in ("▁the", "▁Paris"))
    assert prompt is not None
    assert answer is not None
    assert Detokenizer(llama, skip_special_tokens=True, prompt_token_ids=[prompt]).push(answer) == " Paris"
    assert Detokenizer(llama, skip_special_tokens=True).push(answer) == "Paris"


def test_prompt_ending_in_partial_character_keeps_output_text(tmp_path: Path) -> None:
    llama = sentencepiece(tmp_path / "folder", "llama")
    word = llama.fast.token_to_id("the")
    assert word is not None
    detokenizer = Detokenizer(llama, skip_special_tokens=True, prompt_token_ids=[word, 0xE6, 0x97])
    assert detokenizer.push(word) + detokenizer.push(word) == "thethe"
