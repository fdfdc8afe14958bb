"""The flags of models that see images and videos: how many a prompt may have, what is kept, whence they come."""

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
    """What the engine is configured with, served or not."""
    group.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help=f"most images and videos in a prompt, such as {EXAMPLE}; 0 of both: the model's tower is not loaded "
        f"(default: {UNLIMITED['image']} each)",
    )
    group.add_argument(
        "--mm-processor-cache-gb",
        type=_gibibytes,
        metavar="GIB",
        help="host memory for images and videos that were processed, in each API server and again in each engine core; "
        "on the CPU it is part of the device; 0: none is kept (default: 4, on the CPU an eighth of its memory in all "
        "of them together if that is less)",
    )
    group.add_argument(
        "--mm-encoder-tp-mode",
        choices=get_args(EncoderMode),
        default="weights",
        help="tensor-parallel ranks share the tower's weights, or have it whole and share the images and videos of a "
        "step (default: weights)",
    )
    group.add_argument(
        "--max-num-encoder-input-tokens",
        type=types.positive,
        metavar="TOKENS",
        help="most tokens of images and videos that a step computes; larger items are refused (default: as many as of "
        "text, or of the largest image)",
    )
    group.add_argument(
        "--encoder-cache-size",
        type=types.positive,
        metavar="TOKENS",
        help="how many tokens of images and videos that were computed are kept on the device; larger items are refused "
        "(default: likewise)",
    )


def add_media_source_flags(group: Any) -> None:
    """Whence a server takes images and videos that a request does not bring."""
    group.add_argument(
        "--allowed-local-media-path",
        metavar="DIR",
        help="let requests name files below this folder, as file:///DIR/… (default: none)",
    )
    group.add_argument(
        "--allowed-media-domains",
        nargs="+",
        metavar="HOST[:PORT]",
        help="let requests name files of these hosts, which must have public addresses unless an address is given here "
        "itself (default: none)",
    )


def media_fields(arguments: argparse.Namespace, *, sees_images: bool | None, is_built: bool) -> dict[str, Any]:
    """Fields of the engine's configuration, for a model that takes images and videos or one that does not. Where that
    is not supported (on this device, beside what drafts) its text half alone is served, unless a limit asks for more;
    `sees_images` None: nobody knows yet.
    Raises ConfigError where a limit is given and there is nothing to limit."""
    text = arguments.limit_mm_per_prompt
    default = dict(UNLIMITED) if sees_images and is_built else {}
    limits = default if text is None else parse_modality_limits(text)
    if any(limits.values()) and sees_images is False:
        raise ConfigError(f"--limit-mm-per-prompt {text}: this model takes text alone; leave it out")
    cache_gb = arguments.mm_processor_cache_gb
    return {
        "limit_mm_per_prompt": limits,
        "mm_processor_cache_bytes": None if cache_gb is None else int(cache_gb * (1 << 30)),
        "mm_encoder_tp_mode": arguments.mm_encoder_tp_mode,
        "max_num_encoder_input_tokens": arguments.max_num_encoder_input_tokens,
        "encoder_cache_size": arguments.encoder_cache_size,
    }


def media_sources(arguments: argparse.Namespace) -> AllowedSources:
    """What a server may read besides requests. Raises ConfigError for a folder or a host that is none."""
    folder = arguments.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--allowed-local-media-path {folder} is no folder; create it, or name another")
    return AllowedSources(folder, tuple(AllowedHost.parse(host) for host in arguments.allowed_media_domains or ()))


def _gibibytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_CACHE_GB:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of GiB, 0 or more")
    return number
