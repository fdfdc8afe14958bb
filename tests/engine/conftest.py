"""A byte-level tokenizer of 258 tokens, and a tiny model that goes with it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per byte (its id is the byte), then <|end|> and <|pad|>; the chat template joins the contents."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {character: byte for byte, character in byte_alphabet().items()}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>", "<|pad|>"])
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TINY_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,  # odd, so that its parts on ranks and its rows in blocks differ
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 96,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
TINY_MODEL = TINY_SHAPE | {"vocab_size": 258, "max_position_embeddings": 512, "eos_token_id": 256}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders with a tiny model's configuration alone, some of its fields changed; load_format dummy makes its
    weights, the same ones for the same fields.
    """

    def folder_of(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("configuration")
        (folder / "config.json").write_text(json.dumps(TINY_SHAPE | changes))
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that tokenizer and a model's configuration; load_format dummy makes its weights."""
    folder = tmp_path_factory.mktemp("tiny-model")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(TINY_MODEL))
    return folder


@pytest.fixture(scope="session")
def process_to_fork() -> Iterator[str]:
    """The name of its socket (forked_processes.py)."""
    import forked_processes  # imports the engine

    with forked_processes.process_to_fork() as name:
        yield name


@pytest.fixture
def forked(process_to_fork: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and cores that the test starts are forks of one process that has imported the engine."""
    import forked_processes

    monkeypatch.setenv(forked_processes.SOCKET_VARIABLE, process_to_fork)
    forked_processes.fork_ranks_and_cores(monkeypatch)
