"""Prompts of the offline LLM class in all their forms, and one of them with what became of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.messages import AddRequest
from trimtab_engine.offline.embeddings import PoolingParams
from trimtab_engine.offline.outputs import Choice, RequestMetrics, RequestOutput
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.text.tokenizer import Tokenizer

Params = TypeVar("Params", SamplingParams, PoolingParams)
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the last two with {"multi_modal_data": …} besides."""


@dataclass(slots=True)
class Asked:
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


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # narrowed by its first element
    return list(prompts)  # type: ignore[arg-type]  # likewise


def one_each(params: Params | Sequence[Params], count: int) -> list[Params]:
    """The parameters of every prompt. Raises InvalidRequest where there are neither one nor as many."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        name = "pooling_params" if params and isinstance(params[0], PoolingParams) else "sampling_params"
        raise InvalidRequest(f"there are {count} prompts and {len(params)} {name}; give one, or one each")
    return list(params)


def tokens_of(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """Its text, where there is one, and its token ids. Raises InvalidRequest for a mapping without either."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if not isinstance(prompt, Mapping):
        return None, list(prompt)
    if "prompt_token_ids" in prompt:
        return prompt.get("prompt"), list(prompt["prompt_token_ids"])
    if isinstance(prompt.get("prompt"), str):
        return prompt["prompt"], tokenizer.encode(prompt["prompt"])
    raise InvalidRequest(f"a prompt has the keys {sorted(prompt)}; give prompt or prompt_token_ids")
