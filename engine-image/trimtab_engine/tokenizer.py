"""Text to token ids and back, and the chat template: transformers' tokenizer, without torch.

The template is the model's own, rendered in transformers' sandbox; requests bring none.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.gguf_tokenizer import read_gguf_tokenizer

LONG_TEXT_CHARACTERS = 4096  # from here on tokenising leaves the event loop: it takes about a millisecond
MAX_TEMPLATE_CHARACTERS = 1 << 20  # the largest known are a tenth of it


class Tokenizer:
    """The model's tokenizer. Raises ModelError when it cannot be read."""

    def __init__(self, path: str) -> None:
        try:
            loaded = _load(Path(path))
        except ModelError:
            raise
        except Exception as error:  # transformers raises many kinds, json and rust errors among them
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"cannot read the tokenizer of {path}: {reason}; give --tokenizer a folder with one"
            ) from None
        if len(str(loaded.chat_template or "")) > MAX_TEMPLATE_CHARACTERS:
            raise ModelError(f"the chat template of {path} has more than {MAX_TEMPLATE_CHARACTERS} characters")
        self._tokenizer = loaded
        self.fast: FastTokenizer = loaded.backend_tokenizer
        self.has_chat_template = bool(loaded.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The batch form frees the interpreter while it works, and this one keeps no offsets: 5 times as fast.
        (encoded,) = self.fast.encode_batch_fast([_well_formed(text)], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Long texts are tokenised in a thread, so that other requests' streams go on."""
        if len(text) < LONG_TEXT_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    async def encode_many_async(self, texts: list[str]) -> list[list[int]]:
        """Several texts, with special tokens, in order."""
        if sum(len(text) for text in texts) < LONG_TEXT_CHARACTERS:
            return [self.encode(text) for text in texts]
        return await asyncio.to_thread(lambda: [self.encode(text) for text in texts])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of all tokens together; bytes that are no character become U+FFFD."""
        text: str = self.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it. InvalidRequest when the template refuses it."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # jinja errors and whatever the template itself raises
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return text

    async def render_chat_async(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Long conversations are rendered in a thread, so that other requests' streams go on."""
        render = partial(self.render_chat, messages, add_generation_prompt=add_generation_prompt)
        if sum(len(message["content"]) for message in messages) < LONG_TEXT_CHARACTERS:
            return render()
        return await asyncio.to_thread(render)

    def token_text(self, token_id: int) -> str:
        """One token's text as it stands alone; bytes of a broken character become U+FFFD."""
        text: str = self.fast.decode([token_id], skip_special_tokens=False)
        return text

    def token_name(self, token_id: int) -> str:
        return self.fast.id_to_token(token_id) or ""


class Detokenizer:
    """Incremental text of one sequence: never half a character, and what is held back comes with flush()."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._fast = tokenizer.fast
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []
        """Tokens since the stream last gave text: all that flush() needs to look at."""

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._fast, token_id)
        except Exception:  # its only kind; bytes that are no character shrink what byte-fallback decoders gave before
            return self._begin_anew(token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def _begin_anew(self, token_id: int) -> str:
        """What is held back as it stands, broken bytes as U+FFFD; a character that begins now is still waited for."""
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        is_whole = self._stream.step(self._fast, token_id) is not None
        ready = self._held if is_whole else self._held[:-1]
        self._held = [] if is_whole else [token_id]
        text: str = self._fast.decode(ready, skip_special_tokens=self._skip)
        return text

    def flush(self) -> str:
        """Text of the tokens that never completed a character."""
        if not self._held:
            return ""
        text: str = self._fast.decode(self._held, skip_special_tokens=self._skip)
        self._held = []
        return text


def _load(path: Path) -> Any:
    """From tokenizer.json where there is one, else from the GGUF file; torch is imported for neither."""
    # Imported here: the command line's --help does not need it. Not AutoTokenizer, which imports torch: that would
    # cost this process three seconds and 280 MB.
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    file = path if path.suffix == ".gguf" else _only_gguf(path)
    if file is not None:
        return read_gguf_tokenizer(file)
    return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file to take the tokenizer from, in a folder that has no tokenizer.json."""
    if (folder / "tokenizer.json").exists():
        return None
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _well_formed(text: str) -> str:
    """JSON may carry lone surrogates, which UTF-8 cannot: they become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
