"""Prompt types of the offline LLM class, and one pending prompt with its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.offline.embeddings import PoolingParams
from trimtab_engine.offline.outputs import Choice, RequestMetrics, RequestOutput
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.text.tokenizer import Tokenizer

Params = TypeVar("Params", SamplingParams, PoolingParams)
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token IDs, {"prompt": text} or {"prompt_token_ids": ids}; the last two optionally with {"multi_modal_data":
…}."""


@dataclass(slots=True)
class PendingPrompt:
    """One prompt with all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Choice]
    add: list[AddRequest]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        first = self.choices[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_scheduled_time=first.first_scheduled_time,
                first_token_time=first.first_token_time,
                last_token_time=first.last_token_time,
                num_preemptions=sum(choice.num_preemptions for choice in self.choices),
            ),
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs(),
        )


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list. A list of numbers is one prompt of token IDs."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # narrowed by its first element
    return list(prompts)  # type: ignore[arg-type]  # narrowed by its first element


def expand_params(params: Params | Sequence[Params], count: int) -> list[Params]:
    """Return the parameters of every prompt. Raises InvalidRequest for a mismatched number."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        name = "pooling_params" if params and isinstance(params[0], PoolingParams) else "sampling_params"
        raise InvalidRequest(f"{len(params)} {name} for {count} prompts; set one, or one per prompt")
    return list(params)


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """Return the prompt's text, if any, and its token IDs. Raises InvalidRequest for a mapping without either."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if not isinstance(prompt, Mapping):
        return None, list(prompt)
    if "prompt_token_ids" in prompt:
        return prompt.get("prompt"), list(prompt["prompt_token_ids"])
    if isinstance(prompt.get("prompt"), str):
        return prompt["prompt"], tokenizer.encode(prompt["prompt"])
    raise InvalidRequest(f"a prompt has the keys {sorted(prompt)}; set prompt or prompt_token_ids")
