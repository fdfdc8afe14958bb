"""The engine in this process, for batches: `LLM(model=…).generate(prompts, SamplingParams(…))`, as in vLLM.

The same scheduler, model and sampler as behind the server; no HTTP and no second process. Keywords are the flags of
`trimtab-engine serve`. Not for several threads at once.
"""

import gc
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from trimtab_engine.config.engine import EngineConfig, set_core_environment
from trimtab_engine.device.host_memory import with_device_memory
from trimtab_engine.device.profiler import Profiler
from trimtab_engine.errors import ConfigError, EngineDead, InvalidRequest
from trimtab_engine.messages import AddRequest, PatchConfig
from trimtab_engine.multimodal.items import Span
from trimtab_engine.offline.adapters import OfflineAdapters, Wanted
from trimtab_engine.offline.arguments import in_keywords, read_keywords
from trimtab_engine.offline.conversations import Message, split_pictures
from trimtab_engine.offline.embeddings import AskedVector, EmbeddingRequestOutput, PoolingParams, Vector
from trimtab_engine.offline.outputs import Choice, RequestOutput
from trimtab_engine.offline.progress import OnStep, Rates, Statistics, interruptible
from trimtab_engine.offline.progress_bar import progress_bar
from trimtab_engine.offline.prompts import Asked, Prompt, as_prompts, one_each, tokens_of
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine
    from trimtab_engine.offline.media import OfflineMedia

AnyAsked = Asked | AskedVector
MAX_LOGPROBS = 20  # most that a prompt may ask for, unless the keyword says otherwise

logger = logging.getLogger("trimtab_engine.offline.llm")


class LLM:
    """A model that generates for batches of prompts. Use it as a context manager, or call shutdown() when done.

    `model` is a path, a model of the Hugging Face hub (`ORG/NAME` where no such folder is here, or `hf://ORG/NAME`),
    one of a bucket, `s3://BUCKET/PREFIX`, or one of a registry, `oci://REGISTRY/REPOSITORY:TAG`.
    `on_step` is called with the statistics of each step. Raises ConfigError when the keywords, the model or the machine
    do not allow it, with what to change.
    """

    def __init__(self, model: str, *, on_step: OnStep | None = None, **keywords: Any) -> None:
        config, arguments, self._fetched = read_keywords(model, keywords)
        self._max_logprobs: int = arguments.max_logprobs
        self._log_stats = keywords.get("disable_log_stats", True) is False
        self._start(config, on_step)

    @classmethod
    def of(cls, config: EngineConfig, *, on_step: OnStep | None = None) -> Self:
        """The same from a configuration that is already made."""
        llm = cls.__new__(cls)
        llm._max_logprobs, llm._log_stats, llm._fetched = MAX_LOGPROBS, False, None
        llm._start(config, on_step)
        return llm

    def _start(self, config: EngineConfig, on_step: OnStep | None) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size} needs the server (trimtab-engine serve): an LLM is "
                f"one engine core; leave it out and use tensor_parallel_size or pipeline_parallel_size"
            )
        if config.adapters is not None:  # calls name further ones
            config = msgspec.structs.replace(
                config, adapters=msgspec.structs.replace(config.adapters, is_updatable=True)
            )
        set_core_environment()
        from trimtab_engine.core.startup import start_engine  # torch comes with it, and reads the environment

        try:
            self._engine, self.ready = start_engine(with_device_memory(config), _log_progress, time.monotonic)
        except ConfigError as error:
            raise type(error)(in_keywords(str(error))) from None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_path = config.tokenizer or config.model
        self._numbers = itertools.count()
        self._config = config
        self._media: OfflineMedia | None = None
        self._adapters = OfflineAdapters(self._engine, config.adapters)
        self._statistics = Statistics(on_step, log=self._log_stats, device=config.device)
        self._profiler = Profiler(config.profiler_dir)
        self._closed = False

    # --- what it does ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Wanted = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; outputs come in their order. One SamplingParams for all, or one per prompt; so with
        adapters, which are loaded when they are first asked for.

        Ctrl-C ends it between two steps, frees what was held and raises KeyboardInterrupt: the LLM stays usable.
        Raises InvalidRequest before anything runs when a prompt does not fit.
        """
        self._require_open()
        if self.ready.tasks.no_generation:
            raise InvalidRequest(f"this LLM generates no tokens: {self.ready.tasks.no_generation}")
        every = as_prompts(prompts)
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(every))
        adapters = self._adapters.names_of(lora_request, len(every))
        asked = [self._ask(*each) for each in zip(every, params, adapters, strict=True)]
        self._run(asked, show_progress=use_tqdm)
        return [one.output() for one in asked]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        lora_request: Wanted = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written as the model's chat template writes them. A content may be a list
        of parts, pictures among them (conversations.py)."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[dict[str, Any]] = []
        for conversation in conversations:
            written, pictures = split_pictures(conversation)  # type: ignore[arg-type]  # narrowed by the first one
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
        """One vector of each prompt, in their order. One PoolingParams for all, or one per prompt.

        Ctrl-C as in generate(). Raises InvalidRequest before anything runs when a prompt does not fit.
        """
        self._require_open()
        every = as_prompts(prompts)
        params = one_each(PoolingParams() if pooling_params is None else pooling_params, len(every))
        asked = [self._ask_vector(prompt, of) for prompt, of in zip(every, params, strict=True)]
        self._run(asked, show_progress=use_tqdm)
        return [one.output() for one in asked]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; read when it is first needed."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._tokenizer_path)
        return self._tokenizer

    @property
    def engine(self) -> "Engine":
        """The engine itself, for measurements and tests."""
        self._require_open()
        return self._engine

    # --- steering it ----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The live configuration: the body of GET /admin/v1/config."""
        self._require_open()
        return self._engine.config()

    def patch_config(self, **values: Any) -> dict[str, Any]:
        """Change live values between two calls, as PATCH /admin/v1/config does. ConfigError where that answers 422."""
        self._require_open()
        status, body = self._engine.patch_config(PatchConfig(values))
        if status != 200:
            raise ConfigError(body["message"])
        return body

    def start_profile(self) -> None:
        """Record what the next calls do, with torch.profiler. Needs profiler_dir; ConfigError without it."""
        self._require_open()
        self._profiler.start()

    def stop_profile(self) -> Path:
        """End the recording. Returns the Chrome trace that was written."""
        return Path(self._profiler.stop()["trace"])

    # --- its end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the model's and the KV cache's memory back. Calling it again does nothing."""
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
            raise EngineDead("this LLM was shut down; make a new one")

    # --- the inside -----------------------------------------------------------------------------------------------

    def _ask(self, prompt: Prompt, params: SamplingParams, adapter: str = "") -> Asked:
        """A prompt as the engine takes it. Raises InvalidRequest when it does not fit."""
        text, ids = tokens_of(prompt, self.get_tokenizer())
        spans: tuple[Span, ...] = ()
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if data:
            ids, spans = self._require_media().placed(ids, data)
        limit = self.ready.max_model_len
        self._check_ids(ids)
        if len(ids) >= limit:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, but max_model_len is {limit}, and one token of output needs room; "
                f"shorten it"
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self._max_logprobs:
                raise InvalidRequest(f"{name} is {count}; at most max_logprobs={self._max_logprobs} are given")
        request_id, now = str(next(self._numbers)), time.monotonic()
        sampling = params.of_choices(limit - len(ids), self.get_tokenizer())
        return Asked(
            request_id,
            text,
            ids,
            [Choice(i, params, of.min_tokens, self.get_tokenizer(), now, ids) for i, of in enumerate(sampling)],
            [
                AddRequest(f"{request_id}-{i}", ids, of, now, spans=spans, adapter=adapter)
                for i, of in enumerate(sampling)
            ],
        )

    def _ask_vector(self, prompt: Prompt, params: PoolingParams) -> AskedVector:
        """A prompt that is to become a vector. Raises InvalidRequest when it does not fit."""
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            raise InvalidRequest("embed() takes no multi_modal_data yet; give text")
        text, ids = tokens_of(prompt, self.get_tokenizer())
        self._check_ids(ids)
        if len(ids) > self.ready.max_model_len:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, but max_model_len is {self.ready.max_model_len}; shorten it"
            )
        request_id, pooling = str(next(self._numbers)), params.pooling(self.ready.tasks)
        add = AddRequest(f"{request_id}-0", ids, Sampling(), time.monotonic(), pooling=pooling)
        return AskedVector(request_id, text, ids, [add])

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidRequest for no tokens, and for ids that the model does not have."""
        if not ids:
            raise InvalidRequest("a prompt has no tokens; give at least one")
        if max(ids) >= self.ready.vocab_size or min(ids) < 0:
            raise InvalidRequest(f"a prompt has a token id outside the vocabulary of {self.ready.vocab_size} tokens")

    def _require_media(self) -> "OfflineMedia":
        """What reads images and videos. Raises InvalidRequest where the engine computes none."""
        if not self.ready.modalities:
            raise InvalidRequest("this model takes no multi_modal_data here; give text alone")
        if self._media is None:
            from trimtab_engine.offline.media import OfflineMedia  # Pillow comes with it

            self._media = OfflineMedia(
                self._config.model, self.ready.modalities, self._config.limit_mm_per_prompt, self._config.tokenizer
            )
        return self._media

    def _run(self, asked: Sequence[AnyAsked], *, show_progress: bool) -> None:
        """Step until all have finished. What still runs when this is left early is aborted."""
        running: dict[str, tuple[AnyAsked, Choice | Vector]] = {}
        for one in asked:
            choices: Sequence[Choice | Vector] = one.choices
            running |= {add.request_id: (one, choice) for add, choice in zip(one.add, choices, strict=True)}
        rates = Rates(time.monotonic())
        with (
            interruptible() as interrupted,
            progress_bar("Processed prompts", len(asked), enabled=show_progress) as bar,
        ):
            try:
                for one in asked:
                    for add in one.add:
                        self._engine.add(add)
                while running:
                    if interrupted.is_set():
                        self._abandon(list(running))
                        raise KeyboardInterrupt
                    for one in self._step(running):
                        bar(1, rates.note(one))
            finally:
                if running:
                    self._engine.abort(list(running))

    def _abandon(self, request_ids: list[str]) -> None:
        """Abort, and let a step that is under way end: nobody waits for what it brings."""
        self._engine.abort(request_ids)
        while self._engine.has_work:
            self._engine.step()

    def _step(self, running: dict[str, tuple[AnyAsked, Choice | Vector]]) -> list[AnyAsked]:
        """One step; takes what has ended out of `running` and returns the prompts that are complete with it."""
        step = self._engine.step()
        now = time.monotonic()
        self._statistics.note(step.stats)
        self._profiler.on_step()
        complete: list[AnyAsked] = []
        for output in step.outputs:
            if output.request_id not in running:
                continue  # aborted meanwhile
            one, choice = running[output.request_id]
            if choice.take(output, now):
                self._engine.abort([output.request_id])
            if choice.finish_reason is not None:
                del running[output.request_id]
                if one.finished:
                    complete.append(one)
        return complete


def _log_progress(stage: str, percent: float) -> None:
    logger.debug("loading: %s, %.0f%%", stage, percent)
