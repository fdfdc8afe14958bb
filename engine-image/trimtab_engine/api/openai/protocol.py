"""Request models, validated field by field. OpenAI's names, or vLLM's for fields that OpenAI does not have.

Known but unsupported features (UNSUPPORTED) and unknown fields are rejected, so that nothing is accepted and then
ignored. Only fields that by OpenAI's definition have no effect on the response are accepted without effect.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.api.http.request_identity import REQUEST_ID
from trimtab_engine.api.openai.media import Media
from trimtab_engine.api.openai.prompt_fields import PromptFields, TemplateFields
from trimtab_engine.api.openai.restrictions import NO_RESTRICTIONS, RestrictionFields, Restrictions
from trimtab_engine.api.openai.tools import ToolCalls, ToolFields, ToolList
from trimtab_engine.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from trimtab_engine.multimodal.items import Modality
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.chat_template import ContentForm

MAX_BODY_BYTES = 8 << 20  # a prompt of a million tokens fits; larger bodies are rejected
MAX_MEDIA_BODY_BYTES = 64 << 20  # one image of the largest size in base64, with a conversation
MAX_N = 128  # choices per prompt
MAX_SEQUENCES = 1024  # prompts times n: each is a separate request to the core
MAX_REPORTED = 100_000  # log-probabilities in one response: half a kilobyte each during serialization
MAX_RETURNED_IDS = 1_000_000  # prompt token IDs in one response: ten bytes each during serialization
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # each stop string is searched at every token
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 4096
MAX_NAME_CHARACTERS = 512
MAX_PRIORITY = 2**31 - 1
MAX_FIELDS = 256  # of one JSON object: each unknown one is reported, and many would delay other requests
MAX_INT64 = 2**63 - 1
MAX_FIELD_CHARACTERS = 64  # of a field name for which a similar one is searched
ROUTE_OF_FIELD = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/embeddings"}
MIN_REPETITION_PENALTY = 0.01  # dividing logits by a smaller value overflows
MIN_TOP_P = 1e-6  # 0 keeps the most likely token, as any value below its probability
MIN_TEMPERATURE = 1e-5  # below it sampling is greedy, as in vLLM: dividing logits by a smaller value overflows

# Field: values without effect, which are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "ec_transfer_params": (None,),
    "echo": (None, False),  # in chat; completions have it
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_mm_kwargs": (None, True),
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),  # false would remove blanks between special tokens
    "store": (None, False),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "top_a": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
    "web_search_options": (None,),
}
# OpenAI's fields, and vLLM's session_id, that never change the response.
FIELDS_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "session_id",
)

Number = TypeVar("Number", int, float)
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Stop at the first invalid element: reporting each of a million would take minutes and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class _Fields:
    """Names of a request's fields in JSON."""

    known: frozenset[str]
    optional: frozenset[str]


@cache
def _fields_of(model: type[BaseModel]) -> _Fields:
    names = {field.alias or name: field.is_required() for name, field in model.model_fields.items()}
    return _Fields(frozenset(names), frozenset(name for name, is_required in names.items() if not is_required))


def check_fields(model: type[BaseModel], data: Any, not_built: Mapping[str, tuple[Any, ...]]) -> Any:
    """Return the fields without those that have no effect, and without null in optional fields.

    Raises:
        WrongField: A field is not supported, or is unknown but similar to a known one. pydantic rejects other unknown
            fields.
    """
    if not isinstance(data, dict):
        return data
    _check_number_of_fields(data)
    fields = _fields_of(model)
    missing = not_built.keys() - model.model_fields.keys()
    for name in data.keys() & missing:
        if not any(_is_same(data[name], harmless) for harmless in not_built[name]):
            raise WrongField(name, _not_supported(name, not_built[name]))
    passed_over = missing.union(FIELDS_WITHOUT_EFFECT)
    passed_over |= {name for name, value in data.items() if value is None and name in fields.optional}
    for name in data.keys() - fields.known - passed_over:
        if meant := _field_hint(name, fields.known):
            raise WrongField(name, f"unrecognized request argument: {name}; {meant}")
    return {key: value for key, value in data.items() if key not in passed_over}


def _not_supported(name: str, values_of_nothing: tuple[Any, ...]) -> str:
    """Return the remedy: remove the field, or set a value without effect."""
    harmless: list[Any] = []
    for value in values_of_nothing:
        if value and value not in harmless:
            harmless.append(value)
    if not harmless:
        return f"{name} is not supported yet; remove it"
    values = " or ".join(json.dumps(value) for value in harmless)
    return f"{name} is supported only as {values}; remove it, or set a supported value"


def _field_hint(unknown: Any, known: frozenset[str]) -> str | None:
    """Return a hint for an unknown field: the route that it belongs to, or a similar name; None if there is none."""
    if not isinstance(unknown, str) or len(unknown) > MAX_FIELD_CHARACTERS:
        return None
    if unknown in ROUTE_OF_FIELD:
        return f"it belongs to {ROUTE_OF_FIELD[unknown]}"
    return _similar_name_hint(unknown, known)


def _similar_name_hint(unknown: str, known: Iterable[str]) -> str | None:
    """Return a question with the most similar known name, or None."""
    close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None
    """No effect: chunks are never padded. Padding hides the lengths of tokens from observers of encrypted traffic."""


class GenerationRequest(RestrictionFields, PromptFields):
    """Fields shared by completions and chat completions. Numbers are strict: true is not a number, NaN is rejected."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern.decode()}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        return check_fields(cls, data, UNSUPPORTED)

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise WrongField("stream_options", "stream_options is only allowed when stream is true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise WrongField("min_tokens", f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}")
        if self.prompt_logprobs is not None and self.stream:
            raise WrongField("prompt_logprobs", "prompt_logprobs are not available when stream is true")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        index: int,
        prompt_logprobs: int | None = None,
        restrictions: Restrictions = NO_RESTRICTIONS,
        special_stop: Iterable[int] = (),
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> Sampling:
        """Return the sampling of a prompt's choice `index`; choices differ by their seeds. `special_stop`: token IDs of
        the stop strings that are special tokens. `defaults`: values of fields that the request does not set.
        """
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=_temperature(_first(self.temperature, defaults.temperature, 1.0)),
            top_p=max(_first(self.top_p, defaults.top_p, 1.0), MIN_TOP_P),
            top_k=max(_first(self.top_k, defaults.top_k, 0), 0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            seed=None if self.seed is None else self.seed + index,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            logprobs=logprobs,
            stop_token_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *special_stop))),
            ignore_eos=self.ignore_eos,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self.logit_bias or None,
            allowed_tokens=restrictions.allowed_tokens,
            bad_words=restrictions.bad_words,
            grammar=restrictions.grammar,
        )


def _temperature(given: float) -> float:
    return given if given >= MIN_TEMPERATURE else 0.0


def _first(given: Number | None, default: Number | None, otherwise: Number) -> Number:
    """Return the request's value, else the model's default, else the API's."""
    if given is not None:
        return given
    return otherwise if default is None else default


Texts = Annotated[list[str], Field(fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. A prompt is text or token IDs; a list of prompts gets n choices for each."""

    prompt: str | TokenIds | Texts | TokenLists
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise WrongField("max_tokens", "max_tokens is 0; it must be 1 or more unless echo is true")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """Return all prompts in order.

        Raises:
            ValueError: A prompt is empty, there is none, or there are too many.
        """
        given: Any = self.prompt
        is_list = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
        prompts: Any = given if is_list else [given]
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                where = f"prompt {index} of the list" if is_list else "prompt"
                raise ValueError(f"{where} is empty; send at least one token")
        if len(prompts) * self.n > MAX_SEQUENCES:
            raise ValueError(f"{len(prompts)} prompts with n={self.n} exceed {MAX_SEQUENCES} choices; send fewer")
        return prompts  # type: ignore[no-any-return]  # the model field ensures the type


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        return _check_number_of_fields(data)


class ImageUrl(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    """No effect, as in vLLM: models have one image resolution."""


class VideoUrl(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    url: str | None = None


class MediaPart(BaseModel):
    """An image or a video. `uuid` (vLLM's): the client's ID of its content, which may be sent without the content while
    it is cached.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["image_url", "video_url"]
    uuid: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None

    @property
    def url(self) -> str | None:
        """URL of the content, or None if it is identified only by its uuid."""
        told: ImageUrl | VideoUrl | None = getattr(self, self.type)
        return None if told is None else told.url or None

    @model_validator(mode="after")
    def _check_together(self) -> "MediaPart":
        if self.url is None and self.uuid is None:
            raise ValueError("url is missing; it may only be omitted with the uuid of an item sent before")
        return self


class ImagePart(MediaPart):
    type: Literal["image_url"]
    image_url: ImageUrl | None = None


class VideoPart(MediaPart):
    """vLLM's video part; OpenAI has none."""

    type: Literal["video_url"]
    video_url: VideoUrl | None = None


def _part_tag(part: Any) -> str:
    """Return the type of a part in brackets, which errors.py recognizes as a name that is not a field."""
    return f"[{part['type'] if isinstance(part, dict) else part.type}]"


ContentPart = Annotated[
    Annotated[TextPart, Tag("[text]")]
    | Annotated[ImagePart, Tag("[image_url]")]
    | Annotated[VideoPart, Tag("[video_url]")],
    Discriminator(_part_tag),
]
KINDS: dict[str, Modality] = {"image_url": "image", "video_url": "video"}
PART_TYPES = ("text", *KINDS)
MAX_PARTS = 4096  # of one message
EXAMPLE_PART = '{"type": "text", "text": "Hi"}'


IGNORED_EMPTY_FIELDS = ("audio", "function_call", "refusal", "tool_calls", "tool_call_id", "annotations")
"""Message fields that clients return empty from an earlier response."""


class ChatMessage(BaseModel):
    """One message. Users may send images and videos between texts, if the model supports them (media.py)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Reasoning content of an earlier response, under its former name."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        _check_number_of_fields(data)
        if data.get("role") == "function":
            raise ValueError("messages with role function are not supported; use role tool")
        for name in IGNORED_EMPTY_FIELDS:
            if data.get(name) and name not in cls.model_fields:
                raise ValueError(f"{name} in a message is not supported yet; remove it")
        for name in [name for name in data if name not in cls.model_fields and name not in IGNORED_EMPTY_FIELDS]:
            if len(name) <= MAX_FIELD_CHARACTERS and (meant := _similar_name_hint(name, cls.model_fields)):
                raise WrongField(name, f"unrecognized field of a message: {name}; {meant}")
        for place, part in enumerate(data["content"] if isinstance(data.get("content"), list) else ()):
            if not isinstance(part, dict):
                raise WrongField(f"content.{place}", f"a content part must be an object such as {EXAMPLE_PART}")
            if not isinstance(kind := part.get("type"), str):
                raise WrongField(f"content.{place}.type", f"a content part requires a type, such as {EXAMPLE_PART}")
            if kind not in PART_TYPES:
                wrong = f"content of type {kind[:50]} is not supported; send {', '.join(PART_TYPES)}"
                raise WrongField(f"content.{place}.type", wrong)
        return {key: value for key, value in data.items() if key not in IGNORED_EMPTY_FIELDS or value}

    @model_validator(mode="after")
    def _check_together(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has tool_calls; only role assistant may have them")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"a message of role {self.role} has a tool_call_id; only role tool may have one")
        if self.reasoning_text and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has reasoning; only role assistant may have it")
        if self.role != "user" and self.has_media:
            raise ValueError(f"a message of role {self.role} has an image or a video; only role user may have one")
        if self.content is None and not self.tool_calls and not self.reasoning_text:
            raise ValueError("content is missing; only role assistant with tool_calls may omit it")
        return self

    @property
    def reasoning_text(self) -> str | None:
        return self.reasoning or self.reasoning_content

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def has_media(self) -> bool:
        return isinstance(self.content, list) and any(not isinstance(part, TextPart) for part in self.content)

    def media(self, number: int) -> list[Media]:
        """Return the images and videos of message `number`, in order."""
        found: list[Media] = []
        for place, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, MediaPart):
                where = f"messages[{number}].content[{place}].{part.type}"
                found.append(Media(KINDS[part.type], part.url, where, part.uuid))
        return found

    def _content(self, form: ContentForm) -> str | list[dict[str, str]]:
        """Return the content for a template that renders this form. Images and videos need parts."""
        if self.has_media or (form != "text" and isinstance(self.content, list)):
            return self._parts
        return [{"type": "text", "text": self.text}] if form == "parts" and self.content is not None else self.text

    @property
    def _parts(self) -> list[dict[str, str]]:
        """Return the parts for templates: a text, or a placeholder of another type."""
        assert isinstance(self.content, list)
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": KINDS[part.type]}
            for part in self.content
        ]

    def for_template(self, forms: Mapping[str, ContentForm] = MappingProxyType({})) -> dict[str, Any]:
        """Return the message for a template. `forms` is the content that it renders, by role."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._content(forms.get(role, "text"))}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_text:
            message["reasoning_content"] = self.reasoning_text  # the name that templates use
        return message | {k: v for k, v in (("name", self.name), ("tool_call_id", self.tool_call_id)) if v}


def media_of(messages: Sequence[ChatMessage]) -> list[Media]:
    """Return all images and videos of a conversation, in order."""
    return [media for number, message in enumerate(messages) for media in message.media(number)]


class ChatRequest(GenerationRequest, ToolFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    include_reasoning: bool | None = None
    _is_cut_to_context: bool = PrivateAttr(default=False)

    def cut_to_context(self) -> "ChatRequest":
        """Return this request with max_tokens as an upper bound: fewer are generated if the context ends before."""
        self._is_cut_to_context = True
        return self

    @property
    def is_cut_to_context(self) -> bool:
        return self._is_cut_to_context

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise WrongField("top_logprobs", "top_logprobs requires logprobs true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(TemplateFields, ToolList):
    """Body of POST /tokenize: either prompt or messages. `add_special_tokens` None: as on the generation routes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        return _check_number_of_fields(data)

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either prompt or messages")
        if self.messages is None:
            for name in self.model_fields_set & (TemplateFields.model_fields.keys() | ToolList.model_fields.keys()):
                raise WrongField(name, f"{name} is only allowed with messages; remove it")
        return self


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    tokens: TokenIds

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        return _check_number_of_fields(data)


def _check_number_of_fields(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > MAX_FIELDS:
        raise ValueError(f"a JSON object has {len(data)} fields; at most {MAX_FIELDS} are allowed")
    return data


def _is_same(value: Any, harmless: Any) -> bool:
    """Return True if both are equal and of one type: true is not 1."""
    return type(value) is type(harmless) and value == harmless
