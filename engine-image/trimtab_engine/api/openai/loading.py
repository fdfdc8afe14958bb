"""What one API server reads while the core reads the weights."""

import asyncio
from collections.abc import Callable

from trimtab_engine.api.metrics.observations import Observer
from trimtab_engine.api.metrics.tracing import Tracer
from trimtab_engine.api.openai.chat_renderer import ChatRenderer
from trimtab_engine.api.openai.embedding import Embedder
from trimtab_engine.api.openai.generation import Generator
from trimtab_engine.api.openai.grammar_trials import GrammarTrials
from trimtab_engine.api.openai.media import PromptMedia
from trimtab_engine.api.openai.state import ServerOptions, Serving
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.ipc.garbage import keep_what_is_there
from trimtab_engine.messages import CoreReady
from trimtab_engine.text.chat_template import ChatTemplates
from trimtab_engine.text.tokenizer import Tokenizer


async def load_serving(
    config: EngineConfig,
    options: ServerOptions,
    core: CoreClient,
    observer: Callable[[], Observer | None],
    tracer: Tracer | None,
) -> Serving | None:
    """What exists once the core is ready; None when it has failed. `observer` is asked for then.

    Raises ConfigError where files cannot be read.
    """
    tokenizer = await asyncio.to_thread(Tokenizer, config.tokenizer or config.model)
    renderer = ChatRenderer(_templates(options, tokenizer))
    try:
        await renderer.check()
        await core.loaded.wait()
    except BaseException:  # also cancelled: its process would outlive it
        await renderer.close()
        raise
    facts, watcher = core.ready, observer()
    if facts is None or watcher is None:
        await renderer.close()
        return None
    trials = GrammarTrials(lambda: _vocabulary(facts, tokenizer))
    media = _media(config, options, facts, watcher)
    keep_what_is_there()
    generator, embedder = Generator(core, tokenizer, watcher, tracer), Embedder(core, watcher, tracer)
    return Serving(facts, tokenizer, generator, embedder, trials, renderer, media)


def _media(config: EngineConfig, options: ServerOptions, facts: CoreReady, observer: Observer) -> PromptMedia | None:
    """What reads images and videos, where the engine computes them. Raises ModelError where the checkpoint does not say
    how they are processed."""
    if not facts.modalities:
        return None
    # Imported here: Pillow and numpy are needed by servers of models that see images.
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
    # Imported here: llguidance is needed by servers that are sent grammars.
    from trimtab_engine.structured.vocabulary import vocabulary_of

    vocabulary = vocabulary_of(tokenizer.fast, facts.vocab_size, tuple(facts.eos_token_ids))
    return {
        "tokenizer_json": vocabulary.tokenizer_json,
        "vocab_size": vocabulary.vocab_size,
        "eos_token_ids": list(vocabulary.eos_token_ids),
    }
