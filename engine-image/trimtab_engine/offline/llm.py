"""In-process engine for batches: `LLM(model=…).generate(prompts, SamplingParams(…))`, as in vLLM.

The same scheduler, model and sampler as in the server; no HTTP and no second process. Keywords are the flags of
`trimtab-engine serve`. Not thread-safe.
"""

import argparse
import gc
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from trimtab_engine.config.core_environment import set_core_environment
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.json_flags import read_json_object
from trimtab_engine.config.sampling_defaults import (
    EXAMPLE,
    NO_DEFAULTS,
    OVERRIDE_FLAG,
    SamplingDefaults,
    read_sampling_defaults,
)
from trimtab_engine.device.host_memory import with_device_memory
from trimtab_engine.device.profiler import Profiler
from trimtab_engine.errors import ConfigError, EngineDead, InvalidRequest
from trimtab_engine.messages.admin import PatchConfig
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import Span
from trimtab_engine.offline.adapters import AdapterRequests, OfflineAdapters
from trimtab_engine.offline.arguments import flags_to_keywords, read_keywords
from trimtab_engine.offline.conversations import Message, split_media
from trimtab_engine.offline.embeddings import EmbeddingRequestOutput, PendingEmbedding, PoolingParams, Vector
from trimtab_engine.offline.outputs import Choice, RequestOutput
from trimtab_engine.offline.progress import OnStep, Rates, Statistics, interrupt_event
from trimtab_engine.offline.progress_bar import progress_bar
from trimtab_engine.offline.prompts import PendingPrompt, Prompt, expand_params, list_prompts, tokenize_prompt
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine
    from trimtab_engine.offline.media import OfflineMedia

AnyPending = PendingPrompt | PendingEmbedding
MAX_LOGPROBS = 20  # default maximum per prompt

logger = logging.getLogger("trimtab_engine.offline.llm")


class LLM:
    """A model that generates for batches of prompts. Use it as a context manager, or call shutdown().

    `model` is a path, a model on the Hugging Face hub (`ORG/NAME` if there is no such folder, or `hf://ORG/NAME`), in a
    bucket (`s3://BUCKET/PREFIX`), or in a registry (`oci://REGISTRY/REPOSITORY:TAG`). `on_step` is called with the
    statistics of each step.

    Raises:
        ConfigError: The keywords, the model or the machine do not allow it; the message has the remedy.
    """

    def __init__(self, model: str, *, on_step: OnStep | None = None, **keywords: Any) -> None:
        config, arguments, self._fetched = read_keywords(model, keywords)
        self._max_logprobs: int = arguments.max_logprobs
        self._sampling_defaults = _read_defaults(arguments, config.model)
        self._log_stats = keywords.get("disable_log_stats", True) is False
        self._start(config, on_step)

    @classmethod
    def of(cls, config: EngineConfig, *, on_step: OnStep | None = None) -> Self:
        """Return an LLM with an existing configuration."""
        llm = cls.__new__(cls)
        llm._max_logprobs, llm._log_stats, llm._fetched = MAX_LOGPROBS, False, None
        llm._sampling_defaults = NO_DEFAULTS
        llm._start(config, on_step)
        return llm

    def _start(self, config: EngineConfig, on_step: OnStep | None) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size} requires the server (trimtab-engine serve): an LLM is "
                f"one engine core; use tensor_parallel_size or pipeline_parallel_size"
            )
        if config.adapters is not None:  # calls may name further ones
            config = msgspec.structs.replace(
                config, adapters=msgspec.structs.replace(config.adapters, is_updatable=True)
            )
        set_core_environment()
        from trimtab_engine.core.startup import start_engine  # imports torch, which reads the environment

        try:
            self._engine, self.ready = start_engine(with_device_memory(config), _log_progress, time.monotonic)
        except ConfigError as error:
            raise type(error)(flags_to_keywords(str(error))) from None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_path = config.tokenizer or config.model
        self._numbers = itertools.count()
        self._config = config
        self._media: OfflineMedia | None = None
        self._adapters = OfflineAdapters(self._engine, config.adapters)
        self._statistics = Statistics(on_step, log=self._log_stats, device=config.device)
        self._profiler = Profiler(config.profiler_dir)
        self._closed = False

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterRequests = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return outputs in order. SamplingParams and adapters are one for all prompts, or
        one per prompt; adapters are loaded at first use. Without SamplingParams the model's own defaults apply.

        Ctrl-C stops between two steps, frees all resources and raises KeyboardInterrupt; the LLM stays usable.

        Raises:
            InvalidRequest: A prompt is invalid; raised before anything runs.
        """
        self._require_open()
        if self.ready.tasks.no_generation:
            raise InvalidRequest(f"this LLM does not generate text: {self.ready.tasks.no_generation}")
        every = list_prompts(prompts)
        params = expand_params(
            self.get_default_sampling_params() if sampling_params is None else sampling_params, len(every)
        )
        adapters = self._adapters.names_of(lora_request, len(every))
        pending = [self._make_prompt_request(*each) for each in zip(every, params, adapters, strict=True)]
        self._run(pending, show_progress=use_tqdm)
        return [one.output() for one in pending]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        lora_request: AdapterRequests = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered with the model's chat template. A content may be a list of
        parts, including images (conversations.py).
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[dict[str, Any]] = []
        for conversation in conversations:
            written, pictures = split_media(conversation)  # type: ignore[arg-type]  # narrowed by the first element
            text = self.get_tokenizer().render_chat(written, add_generation_prompt=add_generation_prompt)
            ids = self.get_tokenizer().encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids, "multi_modal_data": pictures})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per prompt, in order. PoolingParams are one for all prompts, or one per prompt.

        Ctrl-C as in generate().

        Raises:
            InvalidRequest: A prompt is invalid; raised before anything runs.
        """
        self._require_open()
        every = list_prompts(prompts)
        params = expand_params(PoolingParams() if pooling_params is None else pooling_params, len(every))
        pending = [self._make_embedding_request(prompt, of) for prompt, of in zip(every, params, strict=True)]
        self._run(pending, show_progress=use_tqdm)
        return [one.output() for one in pending]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the model's sampling defaults, to start from."""
        values = self._sampling_defaults.values
        if "max_new_tokens" in values:
            values["max_tokens"] = values.pop("max_new_tokens")
        return SamplingParams(**values)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._tokenizer_path)
        return self._tokenizer

    @property
    def engine(self) -> "Engine":
        """The engine itself, for measurements and tests."""
        self._require_open()
        return self._engine

    # --- control ------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the live configuration: the body of GET /admin/v1/config."""
        self._require_open()
        return self._engine.config()

    def patch_config(self, **values: Any) -> dict[str, Any]:
        """Change live values between two calls, like PATCH /admin/v1/config. Raises ConfigError for its 422."""
        self._require_open()
        status, body = self._engine.patch_config(PatchConfig(values))
        if status != 200:
            raise ConfigError(body["message"])
        return body

    def start_profile(self) -> None:
        """Profile the next calls with torch.profiler. Raises ConfigError without profiler_dir."""
        self._require_open()
        self._profiler.start()

    def stop_profile(self) -> Path:
        """Stop the profile. Return the path of the Chrome trace."""
        return Path(self._profiler.stop()["trace"])

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the memory of the model and the KV cache. Repeated calls have no effect."""
        if not self._closed:
            self._closed = True
            self._engine.close()
            del self._engine
            gc.collect()
            if self._fetched is not None:
                self._fetched.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM was shut down; create a new one")

    # --- internals ----------------------------------------------------------------------------------------------------

    def _make_prompt_request(self, prompt: Prompt, params: SamplingParams, adapter: str = "") -> PendingPrompt:
        """Return the request of a prompt. Raises InvalidRequest if it does not fit."""
        text, ids = tokenize_prompt(prompt, self.get_tokenizer())
        spans: tuple[Span, ...] = ()
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if data:
            ids, spans = self._require_media().expand_placeholders(ids, data)
        limit = self.ready.max_model_len
        self._check_ids(ids)
        if len(ids) >= limit:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, but max_model_len is {limit}, and at least one output token is "
                "required; shorten it"
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self._max_logprobs:
                raise InvalidRequest(f"{name} is {count}; the maximum is max_logprobs={self._max_logprobs}")
        request_id, now = str(next(self._numbers)), time.monotonic()
        tokenizer = self.get_tokenizer()
        special_stop = tokenizer.special_stop_tokens(params.stop_strings, self.ready.vocab_size)
        sampling = params.sampling_per_choice(limit - len(ids), tokenizer, special_stop)
        return PendingPrompt(
            request_id,
            text,
            ids,
            [Choice(i, params, of.min_tokens, tokenizer, now, ids, special_stop) for i, of in enumerate(sampling)],
            [
                AddRequest(f"{request_id}-{i}", ids, of, now, spans=spans, adapter=adapter)
                for i, of in enumerate(sampling)
            ],
        )

    def _make_embedding_request(self, prompt: Prompt, params: PoolingParams) -> PendingEmbedding:
        """Return the request of a prompt to embed. Raises InvalidRequest if it does not fit."""
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            raise InvalidRequest("embed() does not support multi_modal_data yet; use text")
        text, ids = tokenize_prompt(prompt, self.get_tokenizer())
        self._check_ids(ids)
        if len(ids) > self.ready.max_model_len:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, but max_model_len is {self.ready.max_model_len}; shorten it"
            )
        request_id, pooling = str(next(self._numbers)), params.pooling(self.ready.tasks)
        add = AddRequest(f"{request_id}-0", ids, Sampling(), time.monotonic(), pooling=pooling)
        return PendingEmbedding(request_id, text, ids, [add])

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidRequest for an empty prompt, and for token IDs outside the vocabulary."""
        if not ids:
            raise InvalidRequest("a prompt has no tokens; at least one is required")
        if max(ids) >= self.ready.vocab_size or min(ids) < 0:
            raise InvalidRequest(f"a prompt has a token id outside the vocabulary of {self.ready.vocab_size} tokens")

    def _require_media(self) -> "OfflineMedia":
        """Return the media processor. Raises InvalidRequest if the engine does not support media."""
        if not self.ready.modalities:
            raise InvalidRequest("this model does not support multi_modal_data; use only text")
        if self._media is None:
            from trimtab_engine.offline.media import OfflineMedia  # imports Pillow

            self._media = OfflineMedia(
                self._config.model, self.ready.modalities, self._config.limit_mm_per_prompt, self._config.tokenizer
            )
        return self._media

    def _run(self, pending: Sequence[AnyPending], *, show_progress: bool) -> None:
        """Step until all requests have finished. Leaving early aborts the remaining ones."""
        running: dict[str, tuple[AnyPending, Choice | Vector]] = {}
        for one in pending:
            choices: Sequence[Choice | Vector] = one.choices
            running |= {add.request_id: (one, choice) for add, choice in zip(one.add, choices, strict=True)}
        rates = Rates(time.monotonic())
        with (
            interrupt_event() as interrupted,
            progress_bar("Processed prompts", len(pending), enabled=show_progress) as bar,
        ):
            try:
                for one in pending:
                    for add in one.add:
                        self._engine.add(add)
                while running:
                    if interrupted.is_set():
                        self._abort(list(running))
                        raise KeyboardInterrupt
                    for one in self._step(running):
                        bar(1, rates.note(one))
            finally:
                if running:
                    self._engine.abort(list(running))

    def _abort(self, request_ids: list[str]) -> None:
        """Abort the requests and finish the running step, whose output is dropped."""
        self._engine.abort(request_ids)
        while self._engine.has_work:
            self._engine.step()

    def _step(self, running: dict[str, tuple[AnyPending, Choice | Vector]]) -> list[AnyPending]:
        """Run one step; remove ended sequences from `running` and return the prompts that are complete."""
        step = self._engine.step()
        now = time.monotonic()
        self._statistics.note(step.stats)
        self._profiler.on_step()
        complete: list[AnyPending] = []
        for output in step.outputs:
            if output.request_id not in running:
                continue  # aborted in the meantime
            one, choice = running[output.request_id]
            if choice.take(output, now):
                self._engine.abort([output.request_id])
            if choice.finish_reason is not None:
                del running[output.request_id]
                if one.finished:
                    complete.append(one)
        return complete


def _read_defaults(arguments: argparse.Namespace, model: str) -> SamplingDefaults:
    """Return the model's sampling defaults. Raises ConfigError for invalid ones."""
    text = arguments.override_generation_config
    override = {} if text is None else read_json_object(OVERRIDE_FLAG, text, EXAMPLE)
    return read_sampling_defaults(Path(model), arguments.generation_config, override)


def _log_progress(stage: str, percent: float) -> None:
    logger.debug("loading: %s, %.0f%%", stage, percent)
