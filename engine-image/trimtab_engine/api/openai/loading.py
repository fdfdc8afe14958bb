"""Initialization of an API server while the core loads the weights."""

import asyncio
from collections.abc import Callable

from trimtab_engine.api.metrics.observations import Observer
from trimtab_engine.api.metrics.tracing import Tracer
from trimtab_engine.api.openai.chat_renderer import ChatRenderer
from trimtab_engine.api.openai.embedding import Embedder
from trimtab_engine.api.openai.generation import Generator
from trimtab_engine.api.openai.grammar_validation import GrammarValidator
from trimtab_engine.api.openai.media import PromptMedia
from trimtab_engine.api.openai.state import ServerOptions, Serving
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.ipc.gc_freeze import freeze_startup_objects
from trimtab_engine.messages.lifecycle import CoreReady
from trimtab_engine.text.chat_template import ChatTemplates
from trimtab_engine.text.tokenizer import Tokenizer


async def load_serving(
    config: EngineConfig,
    options: ServerOptions,
    core: CoreClient,
    observer: Callable[[], Observer | None],
    tracer: Tracer | None,
) -> Serving | None:
    """Return the serving state once the core is ready, or None if the core has failed. `observer` is called then.

    Raises:
        ConfigError: Files cannot be read.
    """
    tokenizer = await asyncio.to_thread(Tokenizer, config.tokenizer or config.model)
    renderer = ChatRenderer(_templates(options, tokenizer))
    try:
        await renderer.check()
        await core.loaded.wait()
    except BaseException:  # includes cancellation: the worker process must not outlive the load
        await renderer.close()
        raise
    facts, watcher = core.ready, observer()
    if facts is None or watcher is None:
        await renderer.close()
        return None
    trials = GrammarValidator(lambda: _vocabulary(facts, tokenizer))
    media = _media(config, options, facts, watcher)
    freeze_startup_objects()
    generator, embedder = Generator(core, tokenizer, watcher, tracer), Embedder(core, watcher, tracer)
    return Serving(facts, tokenizer, generator, embedder, trials, renderer, media)


def _media(config: EngineConfig, options: ServerOptions, facts: CoreReady, observer: Observer) -> PromptMedia | None:
    """Return the reader of images and videos, or None for text-only models.

    Raises:
        ModelError: The checkpoint has no processor configuration.
    """
    if not facts.modalities:
        return None
    # Lazy import: only servers of vision models need Pillow and numpy.
    from trimtab_engine.multimodal.checkpoint import read_placeholders, read_processors, read_tile_tokens
    from trimtab_engine.multimodal.processor_cache import ProcessorCache
    from trimtab_engine.multimodal.reader import MediaReader

    cache = ProcessorCache(config.processor_cache_bytes, lambda found: observer.media_looked_up(1, int(found)))
    processors = read_processors(config.model)
    tiles = read_tile_tokens(config.model, processors, config.tokenizer)
    reader = MediaReader(processors, options.media_sources, cache)
    placeholders = read_placeholders(config.model, facts.modalities)
    return PromptMedia(reader, placeholders, config.limit_mm_per_prompt, tiles)


def _templates(options: ServerOptions, tokenizer: Tokenizer) -> ChatTemplates:
    templates = tokenizer.chat_templates
    if options.chat_template is None:
        return templates
    given = ChatTemplates({"default": options.chat_template}, templates.special_tokens, "--chat-template")
    given.check_sizes()
    return given


def _vocabulary(facts: CoreReady, tokenizer: Tokenizer) -> dict[str, object]:
    # Lazy import: only servers that receive grammars need llguidance.
    from trimtab_engine.structured.vocabulary import vocabulary_of

    vocabulary = vocabulary_of(tokenizer.fast, facts.vocab_size, tuple(facts.eos_token_ids))
    return {
        "tokenizer_json": vocabulary.tokenizer_json,
        "vocab_size": vocabulary.vocab_size,
        "eos_token_ids": list(vocabulary.eos_token_ids),
    }
