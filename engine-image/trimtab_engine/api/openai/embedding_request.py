"""Request model of POST /v1/embeddings, validated like protocol.py. OpenAI's names, or vLLM's for fields that OpenAI
does not have.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.api.http.request_identity import REQUEST_ID
from trimtab_engine.api.openai.prompt_fields import PromptFields, TemplateFields
from trimtab_engine.api.openai.protocol import (
    MAX_INT64,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PRIORITY,
    ChatMessage,
    Texts,
    TokenIds,
    TokenLists,
    check_fields,
)

MAX_INPUTS = 2048  # OpenAI's
MAX_VALUES = {"float": 2 << 20, "base64": 8 << 20}
"""Maximum values of all vectors in one response, by encoding: about 25 MB as JSON numbers, 45 MB as base64."""
# Field: values without effect, which are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "softmax": (None,),
    "task": (None, "embed"),
}


class EmbeddingRequest(PromptFields, TemplateFields):
    """Body of POST /v1/embeddings. `input` is text, token IDs, or a list of them; `messages` is a conversation rendered
    with the chat template. None selects the engine's default.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    input: str | TokenIds | Texts | TokenLists | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name of `normalize`."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern.decode()}$")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        return check_fields(cls, data, UNSUPPORTED)

    @model_validator(mode="after")
    def _check_together(self) -> "EmbeddingRequest":
        if (self.input is None) == (self.messages is None):
            raise WrongField("input", "set either input or messages")
        if self.messages is None:
            for name in self.model_fields_set & TemplateFields.model_fields.keys():
                raise WrongField(name, f"{name} is only allowed with messages; remove it")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise WrongField("normalize", "normalize and use_activation conflict; set only one")
        return self

    @property
    def is_normalised(self) -> bool | None:
        """Requested normalization, or None for the default."""
        return self.use_activation if self.normalize is None else self.normalize

    def inputs(self) -> list[str] | list[list[int]]:
        """Return all inputs in order.

        Raises:
            ValueError: An input is empty, there is none, or there are too many.
        """
        given: Any = self.input
        is_list = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
        inputs: Any = given if is_list else [given]
        for index, each in enumerate(inputs):
            if len(each) == 0:
                raise ValueError(
                    f"{f'input {index} of the list' if is_list else 'input'} is empty; send at least one token"
                )
        if len(inputs) > MAX_INPUTS:
            raise ValueError(f"{len(inputs)} inputs exceed the maximum of {MAX_INPUTS}; send fewer")
        return inputs  # type: ignore[no-any-return]  # the model field ensures the type
