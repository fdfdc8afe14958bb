"""The engine in this process, for batches: `LLM(model=…).generate(prompts, SamplingParams(…))`, as in vLLM.

The same scheduler, model and sampler as behind the server; no HTTP and no second process. Keywords are the flags of
`trimtab-engine serve`. Not for several threads at once.
"""

import gc
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from trimtab_engine.api.stats_line import StatisticsLine
from trimtab_engine.config import EngineConfig, set_core_environment
from trimtab_engine.errors import ConfigError, EngineDead, InvalidRequest
from trimtab_engine.llm_arguments import in_keywords, read_keywords
from trimtab_engine.messages import AddRequest, StepStats
from trimtab_engine.outputs import Choice, RequestMetrics, RequestOutput
from trimtab_engine.profiler import Profiler
from trimtab_engine.progress_bar import progress_bar
from trimtab_engine.sampling_params import SamplingParams
from trimtab_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trimtab_engine.engine import Engine

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Message = Mapping[str, str]
OnStep = Callable[[StepStats], None]
STATS_SECONDS = 10.0
MAX_LOGPROBS = 20  # most that a prompt may ask for, unless the keyword says otherwise

logger = logging.getLogger("trimtab_engine.llm")


@dataclass(slots=True)
class _Asked:
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


class LLM:
    """A model that generates for batches of prompts. Use it as a context manager, or call shutdown() when done.

    `on_step` is called with the statistics of each step. Raises ConfigError when the keywords, the model or the machine
    do not allow it, with what to change.
    """

    def __init__(self, model: str, *, on_step: OnStep | None = None, **keywords: Any) -> None:
        config, arguments = read_keywords(model, keywords)
        self._max_logprobs: int = arguments.max_logprobs
        self._log_stats = keywords.get("disable_log_stats", True) is False
        self._start(config, on_step)

    @classmethod
    def of(cls, config: EngineConfig, *, on_step: OnStep | None = None) -> Self:
        """The same from a configuration that is already made."""
        llm = cls.__new__(cls)
        llm._max_logprobs, llm._log_stats = MAX_LOGPROBS, False
        llm._start(config, on_step)
        return llm

    def _start(self, config: EngineConfig, on_step: OnStep | None) -> None:
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size} needs the server (trimtab-engine serve): an LLM is "
                f"one engine core; leave it out and use tensor_parallel_size or pipeline_parallel_size"
            )
        set_core_environment()
        from trimtab_engine.startup import start_engine  # torch comes with it, and reads the environment

        try:
            self._engine, self.ready = start_engine(config, _log_progress, time.monotonic)
        except ConfigError as error:
            raise type(error)(in_keywords(str(error))) from None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_path = config.tokenizer or config.model
        self._numbers = itertools.count()
        self._statistics = _Statistics(on_step, log=self._log_stats)
        self._profiler = Profiler(config.profiler_dir)
        self._closed = False

    # --- what it does ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts; outputs come in their order. One SamplingParams for all, or one per prompt.

        Ctrl-C ends it between two steps, frees what was held and raises KeyboardInterrupt: the LLM stays usable.
        Raises InvalidRequest before anything runs when a prompt does not fit.
        """
        self._require_open()
        every = _as_prompts(prompts)
        params = _one_each(sampling_params, len(every))
        asked = [self._ask(prompt, of) for prompt, of in zip(every, params, strict=True)]
        self._run(asked, show_progress=use_tqdm)
        return [one.output() for one in asked]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written as the model's chat template writes them."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[dict[str, Any]] = []
        for conversation in conversations:
            text = self.get_tokenizer().render_chat(
                [dict(message) for message in conversation],  # type: ignore[arg-type]  # narrowed by the first one
                add_generation_prompt=add_generation_prompt,
            )
            ids = self.get_tokenizer().encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

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
        status, body = self._engine.patch_config({"values": values})
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM was shut down; make a new one")

    # --- the inside -----------------------------------------------------------------------------------------------

    def _ask(self, prompt: Prompt, params: SamplingParams) -> _Asked:
        """A prompt as the engine takes it. Raises InvalidRequest when it does not fit."""
        text, ids = self._tokens(prompt)
        limit = self.ready.max_model_len
        if not ids:
            raise InvalidRequest("a prompt has no tokens; give at least one")
        if len(ids) >= limit:
            raise InvalidRequest(
                f"a prompt has {len(ids)} tokens, but max_model_len is {limit}, and one token of output needs room; "
                f"shorten it"
            )
        if max(ids) >= self.ready.vocab_size or min(ids) < 0:
            raise InvalidRequest(f"a prompt has a token id outside the vocabulary of {self.ready.vocab_size} tokens")
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > self._max_logprobs:
                raise InvalidRequest(f"{name} is {count}; at most max_logprobs={self._max_logprobs} are given")
        request_id, now = str(next(self._numbers)), time.monotonic()
        sampling = params.of_choices(limit - len(ids), self.get_tokenizer())
        return _Asked(
            request_id,
            text,
            ids,
            [Choice(i, params, of.min_tokens, self.get_tokenizer(), now) for i, of in enumerate(sampling)],
            [AddRequest(f"{request_id}-{i}", ids, of, now) for i, of in enumerate(sampling)],
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, list(prompt)
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self.get_tokenizer().encode(prompt["prompt"])
        raise InvalidRequest(f"a prompt has the keys {sorted(prompt)}; give prompt or prompt_token_ids")

    def _run(self, asked: list[_Asked], *, show_progress: bool) -> None:
        """Step until all have finished. What still runs when this is left early is aborted."""
        running = {
            add.request_id: (one, choice) for one in asked for add, choice in zip(one.add, one.choices, strict=True)
        }
        rates = _Rates(time.monotonic())
        with (
            _interruptible() as interrupted,
            progress_bar("Processed prompts", len(asked), enabled=show_progress) as bar,
        ):
            try:
                for one in asked:
                    for add in one.add:
                        self._engine.add(add)
                while running:
                    if interrupted.is_set():
                        raise KeyboardInterrupt
                    for one in self._step(running):
                        bar(1, rates.note(one))
            finally:
                if running:
                    self._engine.abort(list(running))
                    self._land()

    def _land(self) -> None:
        """Let a step that is under way end; nobody waits for what it brings."""
        while self._engine.has_work:
            self._engine.step()

    def _step(self, running: dict[str, tuple[_Asked, Choice]]) -> list[_Asked]:
        """One step; takes what has ended out of `running` and returns the prompts that are complete with it."""
        step = self._engine.step()
        now = time.monotonic()
        self._statistics.note(step.stats)
        self._profiler.on_step()
        complete: list[_Asked] = []
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


class _Rates:
    """Tokens per second so far, for the bar."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._input = self._output = 0

    def note(self, one: _Asked) -> str:
        self._input += len(one.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in one.choices)
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"input {self._input / seconds:.1f} toks/s, output {self._output / seconds:.1f} toks/s"


class _Statistics:
    """Hands each step's statistics on and, when asked to, logs the line that the server logs."""

    def __init__(self, on_step: OnStep | None, *, log: bool) -> None:
        self._on_step = on_step
        self._line = StatisticsLine() if log else None
        self._logged = time.monotonic()

    def note(self, stats: StepStats) -> None:
        if self._on_step is not None:
            self._on_step(stats)
        if self._line is None:
            return
        self._line.add(stats)
        now = time.monotonic()
        if now - self._logged >= STATS_SECONDS:
            for text in self._line.take(now - self._logged)[0]:
                logger.info("%s", text)
            self._logged = now


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of stopping a step in its middle; a second one stops at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def on_signal(_: int, __: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # narrowed by its first element
    return list(prompts)  # type: ignore[arg-type]  # likewise


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(params)} sampling_params; give one, or one each")
    return list(params)


def _log_progress(stage: str, percent: float) -> None:
    logger.debug("loading: %s, %.0f%%", stage, percent)
