"""How a request's prompt is made of its text: the chat template's switches, special tokens, and what is cut off."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.text.chat_template import RESERVED

MAX_TEMPLATE_VALUES = 16
AS_MUCH_AS_FITS = -1

TemplateValue = str | bool | int | float | None


class TemplateFields(BaseModel):
    """The fields of a conversation that its template reads."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, TemplateValue], Field(max_length=MAX_TEMPLATE_VALUES)] | None = None

    @model_validator(mode="after")
    def _check_template_fields(self) -> "TemplateFields":
        if self.continue_final_message and self.add_generation_prompt:
            raise WrongField(
                "continue_final_message",
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one; "
                "set add_generation_prompt to false",
            )
        reserved = RESERVED.intersection(self.chat_template_kwargs or ())
        if reserved:
            raise WrongField(
                "chat_template_kwargs", f"chat_template_kwargs has {min(reserved)!r}, which a field of its own says"
            )
        return self


class PromptFields(BaseModel):
    """vLLM's fields of a generation request about the tokens of its prompt.

    `add_special_tokens` None: completions have those that the tokenizer adds, chats those that their template writes.
    """

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=AS_MUCH_AS_FITS, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> "PromptFields":
        if self.truncate_prompt_tokens == 0:
            raise WrongField(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is 0; keep 1 token or more, or {AS_MUCH_AS_FITS} for as many as fit",
            )
        return self

    def kept(self, prompt: list[int], *, max_model_len: int, max_tokens: int | None) -> list[int]:
        """What is left of a prompt: its last tokens, or its first ones with truncation_side right. As many as fit leave
        room for `max_tokens` tokens of output, or for one where nothing is said."""
        if self.truncate_prompt_tokens is None:
            return prompt
        num_kept = self.truncate_prompt_tokens
        if num_kept == AS_MUCH_AS_FITS:
            num_kept = max(1, max_model_len - max(1, max_tokens or 1))
        return prompt[:num_kept] if self.truncation_side == "right" else prompt[-num_kept:]
