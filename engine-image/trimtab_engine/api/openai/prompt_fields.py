"""Request fields that determine the prompt: chat template arguments, special tokens, and truncation."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.text.chat_template import RESERVED

MAX_TEMPLATE_VALUES = 16
AS_MUCH_AS_FITS = -1

TemplateValue = str | bool | int | float | None


class TemplateFields(BaseModel):
    """Fields of a conversation that its chat template uses."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the template as a variable; it has an effect on models whose template uses it."""
    chat_template_kwargs: Annotated[dict[str, TemplateValue], Field(max_length=MAX_TEMPLATE_VALUES)] | None = None

    @model_validator(mode="after")
    def _check_template_fields(self) -> "TemplateFields":
        if self.continue_final_message and self.add_generation_prompt:
            raise WrongField(
                "continue_final_message",
                "continue_final_message conflicts with add_generation_prompt; set add_generation_prompt to false",
            )
        reserved = RESERVED.intersection(self.chat_template_kwargs or ())
        if reserved:
            raise WrongField(
                "chat_template_kwargs", f"chat_template_kwargs: {min(reserved)!r} has its own field; use that field"
            )
        return self

    @property
    def template_variables(self) -> dict[str, TemplateValue]:
        """Variables of the template. Without effort, templates with the switch enable_thinking turn it off."""
        effort: dict[str, TemplateValue] = {}
        if self.reasoning_effort is not None:
            effort["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return {**effort, **(self.chat_template_kwargs or {})}


class PromptFields(BaseModel):
    """vLLM's fields about prompt tokens.

    `add_special_tokens` None: completions get the tokenizer's special tokens, chats only those of their template.
    """

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=AS_MUCH_AS_FITS, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _check_truncation(self) -> "PromptFields":
        if self.truncate_prompt_tokens == 0:
            raise WrongField(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is 0; set 1 or more, or {AS_MUCH_AS_FITS} for as many as fit",
            )
        return self

    def kept(self, prompt: list[int], *, max_model_len: int, max_tokens: int | None) -> list[int]:
        """Return the truncated prompt: its last tokens, or its first ones with truncation_side right. "As many as fit"
        leaves room for `max_tokens` output tokens, or for one if it is None.
        """
        if self.truncate_prompt_tokens is None:
            return prompt
        num_kept = self.truncate_prompt_tokens
        if num_kept == AS_MUCH_AS_FITS:
            num_kept = max(1, max_model_len - max(1, max_tokens or 1))
        return prompt[:num_kept] if self.truncation_side == "right" else prompt[-num_kept:]
