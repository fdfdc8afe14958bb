"""Text to token IDs and back: transformers' tokenizer without torch, with the model's chat templates."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.model_files.json_files import LFS_POINTER
from trimtab_engine.text.chat_template import ChatTemplate, ChatTemplates, ContentForm
from trimtab_engine.text.gguf_tokenizer import read_gguf_tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.json"
"""Chat template of a processor, as older releases of transformers save it."""
NEW_TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of checkpoints that take images, whose template is the processor's."""
OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
"""Tokenizer files of other libraries, in folders without tokenizer.json."""
LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")
"""Later files of a split GGUF model; the tokenizer is in the first."""
CONTEXT_TOKENS = (
    16  # of a prompt, used as context for decoding its continuation; some may be special tokens without text
)
BROKEN = "\ufffd"  # replacement for bytes that are not a character
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's tokens of single bytes
LONG_TEXT_CHARACTERS = 4096  # longer texts are tokenized in a thread; takes about a millisecond


class Tokenizer:
    """The model's tokenizer. Raises ModelError if it cannot be read."""

    def __init__(self, path: str) -> None:
        try:
            loaded = _load(Path(path))
        except ModelError:
            raise
        except Exception as error:  # transformers raises many types, also json and Rust errors
            raise ModelError(
                f"cannot read the tokenizer of {path}: {_reason(Path(path), error)}; fetch it again, or "
                "set --tokenizer to a folder with one"
            ) from None
        self.fast: FastTokenizer = loaded.backend_tokenizer
        self.chat_templates = _chat_templates(loaded, path)
        self.chat_templates.check_sizes()
        added = self.fast.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        self.special_ids = frozenset(self._special_ids.values())
        self._compiled: dict[str, ChatTemplate] = {}
        self._content_forms: dict[str, dict[str, ContentForm]] = {}
        is_byte_level = isinstance(self.fast.decoder, ByteLevel)
        self._is_byte_level = is_byte_level
        self._token_bytes: dict[int, bytes] = {}
        self.token_lengths = TokenLengths(self)
        self._token_texts = {skip: TokenTexts(self.fast, skip) for skip in (False, True)} if is_byte_level else {}

    def token_texts(self, *, skip_special_tokens: bool) -> "TokenTexts | None":
        """Return each token's text, if it is independent of its position: with byte-level tokens, whose bytes are
        concatenated. None if it depends on the preceding tokens.
        """
        return self._token_texts.get(skip_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch call releases the GIL and computes no offsets: 5 times as fast.
        (encoded,) = self.fast.encode_batch_fast([well_formed(text)], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode; long texts in a thread, so that other requests' streams continue."""
        if len(text) < LONG_TEXT_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    async def encode_many_async(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts, in order."""

        def encoded() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return encoded() if sum(map(len, texts)) < LONG_TEXT_CHARACTERS else await asyncio.to_thread(encoded)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all tokens together; invalid bytes become U+FFFD."""
        text: str = self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation in this process without a time limit, for the offline API.

        Raises:
            InvalidRequest: The template rejects the messages.
            ModelError: The template is invalid.
        """
        text = self.chat_templates.text(with_tools=False)
        if text is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        if text not in self._compiled:
            self._compiled[text] = ChatTemplate(
                text, self.chat_templates.special_tokens, self.chat_templates.name(with_tools=False)
            )
        template = self._compiled[text]
        if text not in self._content_forms:
            self._content_forms[text] = template.content_forms()
        forms = self._content_forms[text]
        shown = [_in_form(message, forms.get(message.get("role", ""), "text")) for message in messages]
        return template.render(shown, add_generation_prompt=add_generation_prompt)

    def token_text(self, token_id: int) -> str:
        """Return one token's isolated text; bytes of an incomplete character become U+FFFD."""
        text: str = self.fast.decode([token_id], skip_special_tokens=False)
        return text

    def added_text(self, token_id: int) -> str:
        """Return what one token adds to a text that precedes it, with its blank; bytes of an incomplete character
        become U+FFFD.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def mixes_special_text(self, text: str) -> bool:
        """Return True if the text contains a special token and something else; text without special tokens never has
        it.
        """
        return text not in self._special_ids and any(special in text for special in self._special_ids)

    def special_stop_tokens(self, stop: Sequence[str], vocab_size: int) -> dict[int, str]:
        """Return {token ID: stop string} of the stop strings that are exactly one special token. Text without special
        tokens never contains them, so that only the token can stop the answer.
        """
        found = {self._special_ids[text]: text for text in stop if text in self._special_ids}
        return {token_id: text for token_id, text in found.items() if token_id < vocab_size}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which may be a part of a character. At the beginning of a text,
        SentencePiece drops a token's blank.
        """
        if token_id not in self._token_bytes:
            self._token_bytes[token_id] = self._read_token_bytes(token_id)
        return self._token_bytes[token_id]

    def _read_token_bytes(self, token_id: int) -> bytes:
        name = self.token_name(token_id)
        if self._is_byte_level:
            is_alphabet = all(character in BYTE_OF_CHARACTER for character in name)
            return bytes(BYTE_OF_CHARACTER[character] for character in name) if is_alphabet else name.encode()
        text = self.token_text(token_id)
        byte = BYTE_TOKEN.fullmatch(name)
        if byte is not None and text != name:
            return bytes.fromhex(byte[1])
        twice = self.decode([token_id, token_id])  # the second one is not at the beginning
        return (twice.removeprefix(text) if twice.startswith(text) else text).encode()

    def ends_of_tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the character position in the text after each token. Slower than encode()."""
        (encoded,) = self.fast.encode_batch([well_formed(text)], add_special_tokens=add_special_tokens)
        return list(accumulate((end for _, end in encoded.offsets), max))

    def token_name(self, token_id: int) -> str:
        return self.fast.id_to_token(token_id) or ""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokens: printable bytes as themselves, others after U+0100 in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


class TokenLengths(dict[int, int]):
    """Cached number of bytes that each token adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> int:
        self[token_id] = length = len(self._tokenizer.token_bytes(token_id))
        return length


class TokenTexts(dict[int, str | None]):
    """Cached text of each token; None for bytes that are not whole characters by themselves."""

    def __init__(self, fast: FastTokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._fast, self._skip = fast, skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._fast.decode([token_id], skip_special_tokens=self._skip)
        self[token_id] = whole = None if BROKEN in text else text
        return whole


class Detokenizer:
    """Incremental text of one sequence: never an incomplete character; flush() returns held-back text.

    `prompt_token_ids` precede it: its text is the text of both minus the prompt's. SentencePiece drops the blank before
    the first piece of a text, which the first piece of an output is not.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._fast = tokenizer.fast
        self._skip = skip_special_tokens
        self._texts = tokenizer.token_texts(skip_special_tokens=skip_special_tokens)
        self._context = self._readable(prompt_token_ids) if self._texts is None else []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []
        """Tokens since the stream last returned text, which flush() needs."""

    def _readable(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the end of the prompt from where it decodes cleanly; the cut may fall inside a character."""
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        while context and BROKEN in self._fast.decode(context, skip_special_tokens=self._skip):
            del context[0]
        return context

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, like push()."""
        if self._texts is not None and not self._held:
            texts = [self._texts[token_id] for token_id in token_ids]
            if None not in texts:
                return cast("list[str]", texts)
        return [self.push(token_id) for token_id in token_ids]

    def push(self, token_id: int) -> str:
        if self._texts is not None and not self._held:
            whole = self._texts[token_id]
            if whole is not None:
                return whole
            self._stream = DecodeStream(skip_special_tokens=self._skip)  # all previous text was complete
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._fast, token_id)
        except Exception:  # the library's only type; invalid bytes shrink earlier text of byte-fallback decoders
            return self._restart_stream(token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def _restart_stream(self, token_id: int) -> str:
        """Return the held-back text, with invalid bytes as U+FFFD; a character starting now is still held back."""
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        is_whole = self._stream.step(self._fast, token_id) is not None
        ready = self._held if is_whole else self._held[:-1]
        self._held = [] if is_whole else [token_id]
        text: str = self._fast.decode(ready, skip_special_tokens=self._skip)
        return text

    def flush(self) -> str:
        """Return the text of tokens that never completed a character."""
        if not self._held:
            return ""
        text: str = self._fast.decode(self._held, skip_special_tokens=self._skip)
        self._held = []
        return text


def _chat_templates(loaded: Any, path: str) -> ChatTemplates:
    """Return the templates; transformers has one template as text, several as a dictionary by name. The processor's
    template has priority, as in transformers' processors, unless chat_template.jinja has replaced it.
    """
    given = loaded.chat_template
    folder = Path(path)
    has_processor = any((folder / name).exists() for name in PROCESSOR_FILES)
    if not given or (has_processor and not (folder / NEW_TEMPLATE_FILE).exists()):
        given = _processor_template(folder / TEMPLATE_FILE) or given
    by_name = {"default": given} if isinstance(given, str) else dict(given or {})
    special = {name: str(token) for name, token in loaded.special_tokens_map.items() if not isinstance(token, list)}
    return ChatTemplates({name: text for name, text in by_name.items() if text}, special, path)


def _processor_template(file: Path) -> str | None:
    """Return the template of chat_template.json, or None if there is no such file.

    Raises:
        ModelError: The file has no template.
    """
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        template = None
    if not isinstance(template, str):
        raise ModelError(f"{file}: is not a JSON object with a chat_template; fetch it again")
    return template


def _load(path: Path) -> Any:
    """Load from tokenizer.json, else from the GGUF file, both without torch."""
    # Lazy import: --help does not need it. AutoTokenizer would import torch, which costs this process three seconds and
    # 280 MB.
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    file = path if path.suffix == ".gguf" else _single_gguf_file(path)
    if file is not None:
        return read_gguf_tokenizer(file)
    if not (path / TOKENIZER_FILE).exists():
        raise ModelError(_missing_tokenizer_error(path))
    return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)


def _missing_tokenizer_error(path: Path) -> str:
    """Return the error text for a path without tokenizer.json: the files found instead, and the remedy."""
    remedy = "set --tokenizer to a folder with one"
    if path.is_file():
        return f"no tokenizer in {path}: it is a file; {remedy}"
    if not path.is_dir():
        return f"no tokenizer in {path}: no such folder; {remedy}"
    other = next((name for name in OTHER_FORMS if (path / name).exists()), None)
    if other is not None:
        remedy = (
            f"{other} is not supported; create {TOKENIZER_FILE} with transformers, "
            f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or {remedy}"
        )
    return f"no tokenizer in {path}: {TOKENIZER_FILE} is missing; {remedy}"


def _reason(path: Path, error: Exception) -> str:
    """Return the reason why a tokenizer cannot be read: a file that is not a JSON object, else the library's first
    line.
    """
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        file = path / name
        if file.is_file() and not _is_json_object(file):
            with file.open("rb") as stream:
                is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
            if is_pointer:
                return f"{name} is a Git LFS pointer, not the file (git lfs pull)"
            return f"{name} is not a JSON object; it may be truncated"
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _is_json_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _single_gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file that has the tokenizer, in a folder without tokenizer.json."""
    if (folder / TOKENIZER_FILE).exists():
        return None
    files = [file for file in folder.glob("*.gguf") if LATER_PART.search(file.name) is None]
    return files[0] if len(files) == 1 else None


def _in_form(message: Mapping[str, Any], form: ContentForm) -> Mapping[str, Any]:
    """Return the message with the content that a template renders: text parts joined by line breaks for templates that
    take text only, a text as a part for templates that take parts only. Images and videos need parts.
    """
    content = message.get("content")
    if form == "parts" and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if form == "text" and isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def well_formed(text: str) -> str:
    """Return the text with lone surrogates, which JSON allows but UTF-8 does not, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
