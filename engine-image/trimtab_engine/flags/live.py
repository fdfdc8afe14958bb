"""Flags of live parameters other than the three main ones: start values, and the upper bound of swap space."""

import argparse
from typing import Any, get_args

from trimtab_engine.config.engine import LogLevel
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser as types
from trimtab_engine.scheduling.policy import PreemptionMode, QueueOrder

DEFAULT_SWAP_BYTES = 4 << 30  # vLLM's --swap-space, used if host memory is separate from device memory


def add_scheduling_flags(group: Any) -> None:
    group.add_argument(
        "--long-prefill-token-threshold",
        type=types.not_negative,
        default=0,
        metavar="TOKENS",
        help="maximum prompt tokens per request and step while other requests run; live (default: 0, no limit)",
    )
    group.add_argument(
        "--watermark",
        type=types.fraction,
        default=0.0,
        metavar="FRACTION",
        help="fraction of KV blocks kept free when admitting a request while others run; live (default: 0)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=get_args(QueueOrder),
        default="fcfs",
        help="queue order: arrival (fcfs), request priority, or deadline: under overload, requests first that "
        "can still meet --ttft-target; live (default: fcfs)",
    )
    group.add_argument(
        "--ttft-target",
        type=types.seconds,
        default=0.0,
        metavar="SECONDS",
        help="TTFT target in seconds, used by --scheduling-policy deadline; live (default: 0, none)",
    )
    group.add_argument(
        "--ttft-target-per-prompt-token",
        type=types.seconds,
        default=0.0,
        metavar="SECONDS",
        help="seconds added to --ttft-target per prompt token; live (default: 0)",
    )
    group.add_argument(
        "--preemption-mode",
        choices=get_args(PreemptionMode),
        default="recompute",
        help="handling of a preempted request's KV cache; auto: the cheaper of both; live (default: recompute)",
    )
    group.add_argument(
        "--swap-space",
        type=types.swap_space,
        metavar="SIZE",
        help="host memory for preempted requests in GiB or as 512Mi; on the CPU part of device memory; live "
        "(default: 0 with --preemption-mode recompute, else 4 GiB on CUDA)",
    )
    group.add_argument(
        "--swap-space-cap",
        type=types.swap_space,
        metavar="SIZE",
        help="upper bound for live changes (default: the start value)",
    )
    group.add_argument(
        "--kv-offload-size",
        type=types.swap_space,
        default=0,
        metavar="SIZE",
        help="host memory for prefixes evicted from the KV cache, in GiB or as 512Mi; on the CPU part of "
        "device memory; live (default: 0, off)",
    )
    group.add_argument(
        "--kv-offload-size-cap",
        type=types.swap_space,
        metavar="SIZE",
        help="upper bound for live changes (default: the start value)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse KV blocks of equal prompt prefixes; live (default: on)",
    )


def add_queue_flags(group: Any) -> None:
    for name, what in (("reqs", "waiting requests"), ("tokens", "prompt tokens waiting for their first output")):
        group.add_argument(
            f"--max-num-queued-{name}",
            type=types.not_negative,
            default=0,
            metavar="N",
            help=f"maximum number of {what}; beyond it requests get 503 with Retry-After; live (default: 0, no limit)",
        )


def add_log_flags(group: Any) -> None:
    group.add_argument(
        "--disable-log-stats", action="store_true", help="disable the statistics log line and engine metrics; live"
    )
    group.add_argument(
        "--stats-interval-seconds",
        type=types.seconds,
        default=10.0,
        metavar="SECONDS",
        help="interval of the statistics log line in seconds; live (default: 10)",
    )
    group.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default="info",
        help="log level of the engine; live (default: info)",
    )


def live_values(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the EngineConfig fields that these flags set.

    Raises:
        ConfigError: Flags contradict each other.
    """
    swap_space, cap = _swap_space(arguments, device)
    return {
        "long_prefill_token_threshold": arguments.long_prefill_token_threshold,
        "watermark": arguments.watermark,
        "scheduling_policy": arguments.scheduling_policy,
        "ttft_target": arguments.ttft_target,
        "ttft_target_per_prompt_token": arguments.ttft_target_per_prompt_token,
        "preemption_mode": arguments.preemption_mode,
        "swap_space_bytes": swap_space,
        "swap_space_bytes_cap": cap,
        "kv_offload_bytes": arguments.kv_offload_size,
        "kv_offload_bytes_cap": arguments.kv_offload_size
        if arguments.kv_offload_size_cap is None
        else arguments.kv_offload_size_cap,
        "enable_prefix_caching": arguments.enable_prefix_caching,
        "max_num_queued_reqs": arguments.max_num_queued_reqs,
        "max_num_queued_tokens": arguments.max_num_queued_tokens,
        "disable_log_stats": arguments.disable_log_stats,
        "stats_interval_seconds": arguments.stats_interval_seconds,
        "log_level": arguments.log_level,
    }


def _swap_space(arguments: argparse.Namespace, device: str) -> tuple[int, int]:
    """Return the start value and the upper bound of swap space, in bytes."""
    size, mode = arguments.swap_space, arguments.preemption_mode
    if size is None:
        size = DEFAULT_SWAP_BYTES if mode != "recompute" and device == "cuda" else 0
    cap = size if arguments.swap_space_cap is None else arguments.swap_space_cap
    if mode != "recompute" and cap == 0:
        raise ConfigError(
            f"--preemption-mode: requires swap space ({mode}); on the CPU it is part of device memory and "
            f"has no default: set --swap-space, such as 0.5 (GiB) or 512Mi"
        )
    return size, cap
