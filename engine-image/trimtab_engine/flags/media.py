"""Flags of vision models: limits per prompt, caches, and allowed sources of images and videos."""

import argparse
import math
from pathlib import Path
from typing import Any, get_args

from trimtab_engine.config.engine import EncoderMode
from trimtab_engine.config.modality_limits import EXAMPLE, UNLIMITED, parse_modality_limits
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types
from trimtab_engine.multimodal.sources import AllowedHost, AllowedSources

MAX_CACHE_GB = 65_536.0


def add_media_flags(group: Any) -> None:
    """Add the engine's media flags, used with and without a server."""
    group.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help=f"maximum number of images and videos per prompt, such as {EXAMPLE}; both 0: do not load the vision "
        f"encoder (default: {UNLIMITED['image']} each)",
    )
    group.add_argument(
        "--mm-processor-cache-gb",
        type=_gibibytes,
        metavar="GIB",
        help="GiB of host memory for processed images and videos, in each API server and each engine core; "
        "on the CPU part of device memory; 0: no cache (default: 4; on the CPU at most an eighth of its memory "
        "over all caches)",
    )
    group.add_argument(
        "--mm-encoder-tp-mode",
        choices=get_args(EncoderMode),
        default="weights",
        help="parallelism of the vision encoder; weights: split its weights over ranks; data: split the images and "
        "videos of a step (default: weights)",
    )
    group.add_argument(
        "--max-num-encoder-input-tokens",
        type=types.positive,
        metavar="TOKENS",
        help="maximum image and video tokens encoded per step; larger items are rejected (default: the text token "
        "budget, or the largest image)",
    )
    group.add_argument(
        "--encoder-cache-size",
        type=types.positive,
        metavar="TOKENS",
        help="encoder cache size in image and video tokens; larger items are rejected (default: the same)",
    )


def add_media_source_flags(group: Any) -> None:
    """Add the flags for images and videos that a server reads from files or URLs."""
    group.add_argument(
        "--allowed-local-media-path",
        metavar="DIR",
        help="folder whose files requests may reference as file:///DIR/… (default: none)",
    )
    group.add_argument(
        "--allowed-media-domains",
        nargs="+",
        metavar="HOST[:PORT]",
        help="hosts whose files requests may reference; they must have public addresses, unless the address itself is "
        "listed here (default: none)",
    )


def media_fields(arguments: argparse.Namespace, *, takes_images: bool | None, is_built: bool) -> dict[str, Any]:
    """Return EngineConfig's media fields.

    Serves only the language model if vision is not supported (on this device or with this drafting method) and no limit
    requests it. `sees_images` is None if this is not known yet.

    Raises:
        ConfigError: A limit is set for a text-only model.
    """
    text = arguments.limit_mm_per_prompt
    default = dict(UNLIMITED) if takes_images and is_built else {}
    limits = default if text is None else parse_modality_limits(text)
    if any(limits.values()) and takes_images is False:
        raise ConfigError(f"--limit-mm-per-prompt {text}: this model only accepts text; remove it")
    cache_gb = arguments.mm_processor_cache_gb
    return {
        "limit_mm_per_prompt": limits,
        "mm_processor_cache_bytes": None if cache_gb is None else int(cache_gb * (1 << 30)),
        "mm_encoder_tp_mode": arguments.mm_encoder_tp_mode,
        "max_num_encoder_input_tokens": arguments.max_num_encoder_input_tokens,
        "encoder_cache_size": arguments.encoder_cache_size,
    }


def media_sources(arguments: argparse.Namespace) -> AllowedSources:
    """Return the files and hosts that requests may reference.

    Raises:
        ConfigError: A folder or a host is invalid.
    """
    folder = arguments.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--allowed-local-media-path {folder} is not a folder; create it, or set another")
    return AllowedSources(folder, tuple(AllowedHost.parse(host) for host in arguments.allowed_media_domains or ()))


def _gibibytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_CACHE_GB:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of GiB, 0 or more")
    return number
