"""vLLM's other flags: accepted without effect, called differently here, or rejected by name.

Source: the parser of `vllm serve` 0.32, and flags that versions 0.8 to 0.31 had. In the tables, `--flag|-f=a,b` has a
short form, and values that change nothing. A switch has both forms, --x and --no-x; the form without effect is
accepted.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_engine.flags.parser import UnsupportedFlag


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM that the engine does not have."""

    names: tuple[str, ...]
    """The flag, and its short form if it has one."""
    is_switch: bool
    reason: str
    """Why it has no effect, or what to do instead."""
    is_ignored: bool = False
    """True: every value is accepted, with a warning."""
    harmless: tuple[str, ...] = ()
    """Values that equal the engine's behavior."""


IGNORED_SWITCHES: dict[str, str] = {
    "the engine selects its kernels": (
        "--enable-flashinfer-autotune --disable-cascade-attn --disable-custom-all-reduce --use-fp64-gumbel "
        "--enable-hc-sp --enable-batch-sharded-sampling --enable-flash-late-interaction --enable-dbo "
        "--dcp-q-replicate --disable-nccl-for-dp-synchronization --enable-ep-weight-filter"
    ),
    "the engine has its own processes": (
        "--ray-workers-use-nsight --enable-shm-tensor-arena --enable-nccl-comm-suspend --enable-cumem-allocator "
        "--numa-bind --disable-frontend-multiprocessing --engine-use-ray --worker-use-ray --disable-async-output-proc "
        "--use-v2-block-manager --multi-step-stream-outputs --fail-on-environ-validation"
    ),
    "weights are read in one way": "--use-tqdm-on-load",
    "logs and metrics are fixed": (
        "--disable-uvicorn-access-log --log-error-stack --enable-logging-iteration-details --aggregate-engine-logging "
        "--kv-cache-metrics --cudagraph-metrics --enable-layerwise-nvtx-tracing --enable-mfu-metrics "
        "--jit-monitor-verbose --enable-log-deltas --disable-log-requests"
    ),
    "it is always on": (
        "--enable-sleep-mode --enable-server-load-tracking --enable-prompt-tokens-details --enable-request-id-headers "
        "--scheduler-reserve-full-isl --enable-reasoning"
    ),
    "there are no such pages": "--disable-fastapi-docs --enable-offline-docs",
    "KV groups are chosen by the model's layers": "--disable-hybrid-kv-cache-manager --swa-bounded-replay",
    "no supported model has such layers": (
        "--enable-mamba-cache-stochastic-rounding --use-replayssm --enable-mamba-shared-prefix-checkpoint"
    ),
    "images and videos have one path": (
        "--skip-mm-profiling --mm-device-do-normalize --enable-multimodal-encoder-data-parallel"
    ),
    "adapters have one path": ("--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras"),
    "structured output always uses llguidance": (
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
        "--guided-decoding-disable-additional-properties"
    ),
    "code from model repositories is never executed": "--trust-remote-code",
    "the checkpoint's format is checked by name": "--allow-deprecated-quantization",
}
"""Reason → switches that are accepted without effect."""
IGNORED_VALUES: dict[str, str] = {
    "the engine selects its kernels": (
        "--attention-backend --attention-config|-ac --moe-backend --linear-backend --ir-op-priority --kernel-config "
        "--sparse-indexer-topk-backend --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend "
        "--mm-encoder-attn-backend --all2all-backend --dcp-comm-backend --ubatch-size --dbo-decode-token-threshold "
        "--dbo-prefill-token-threshold --dp-sync-interval"
    ),
    "the engine has its own processes": (
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds --max-parallel-loading-workers "
        "--numa-bind-nodes --numa-bind-cpus --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config "
        "--num-lookahead-slots"
    ),
    "weights are read in one way": (
        "--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--pt-load-map-location --ignore-patterns"
    ),
    "logs and metrics are fixed": (
        "--uvicorn-log-level --disable-access-log-for-endpoints --max-log-len --show-hidden-metrics-for-version "
        "--collect-detailed-traces --kv-cache-metrics-sample --jit-monitor-mode --log-stats-interval"
    ),
    "the server's limits are fixed": "--h11-max-incomplete-event-size --h11-max-header-count",
    "the prefix cache has one hash and no expiry": (
        "--prefix-caching-hash-algo --prefix-cache-retention-interval --prefix-match-unit"
    ),
    "no supported model has such layers": (
        "--mamba-backend --mamba-ssu-algorithm --mamba-cache-philox-rounds --mamba-cache-dtype "
        "--mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --replayssm-buffer-len"
    ),
    "images and videos have one path": (
        "--mm-processor-cache-type --mm-hasher-algorithm --mm-tensor-ipc --mm-shm-cache-max-object-size-mb "
        "--mm-processor-device --mm-ipc-gpu-memory-gb"
    ),
    "adapters have one path": "--max-lora-cls-labels --lora-extra-vocab-size --long-lora-scaling-factors",
    "structured output always uses llguidance": "--guided-decoding-backend",
}
"""Reason → flags with a value that are accepted without effect."""
REJECTED_SWITCHES: dict[str, str] = {
    'use --limit-mm-per-prompt \'{"image": 0, "video": 0}\'': "--language-model-only",
    "use --mm-processor-cache-gb 0": "--disable-mm-preprocessor-cache",
    "remove it": (
        "--grpc --trust-request-chat-template --trust-request-mm-kwargs "
        "--return-tokens-as-token-ids --exclude-tools-when-tool-choice-none --enable-per-request-metrics "
        "--enable-force-include-usage --enable-tokenizer-info-endpoint --enable-log-outputs --tokens-only "
        "--enable-scale-out --enable-ssl-refresh --enable-return-routed-experts --return-sampling-mask "
        "--enable-trace-replay --disable-sliding-window --skip-tokenizer-init --enable-prompt-embeds "
        "--sleep-mode-offload-cudagraph --enable-fault-tolerance --data-parallel-multi-port-external-lb|-dpm "
        "--enable-elastic-ep --kv-sharing-fast-prefill --enable-mm-embeds --mm-encoder-only --interleave-mm-strings "
        "--fully-sharded-loras --enable-lora-bias --enable-tower-connector-lora "
        "--long-prefill-token-threshold-adaptive --disable-chunked-mm-input --enable-prompt-adapter "
        "--calculate-kv-scales --cohere-is-reasoning-model"
    ),
}
"""What to do instead → switches that are rejected if they are on."""
REJECTED_VALUES: dict[str, str] = {
    "use --max-num-batched-tokens": "--max-num-scheduled-tokens",
    "use --max-num-seqs": "--max-num-active-seqs",
    "use --kv-offload-size": "--kv-offloading-size=0",
    "use --max-cudagraph-capture-size": "--max-seq-len-to-capture --max-context-len-to-capture",
    "use --cudagraph-capture-sizes": "--cuda-graph-sizes",
    "use --speculative-config": (
        "--speculative-model --num-speculative-tokens --ngram-prompt-lookup-max --ngram-prompt-lookup-min "
        "--speculative-draft-tensor-parallel-size"
    ),
    "use --runner pooling for embeddings": "--task=auto,generate",
    "use --reasoning-parser": "--reasoning-config",
    "set the variable HF_TOKEN": "--hf-token",
    "use CUDA_VISIBLE_DEVICES": "--device-ids",
    "set rope_parameters in the model's config.json": "--rope-scaling --rope-theta",
    "set the fields in config.json of a copy of the model's folder": "--hf-overrides={}",
    "use --revision": "--code-revision --tokenizer-revision",
    "use a reverse proxy for TLS": ("--ssl-certfile --ssl-keyfile --ssl-ca-certs --ssl-cert-reqs=0 --ssl-ciphers"),
    "remove it": (
        "--grpc-port "
        "--chat-template-content-format=auto --default-chat-template-kwargs={} "
        "--response-role=assistant --tool-parser-plugin --tool-strict-level=auto --tool-server "
        "--sse-keep-alive-interval=0 --cohere-format --anthropic-disabled-thinking-effort=auto "
        "--fingerprint-mode=none --fingerprint-value --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --middleware --convert=auto,none "
        "--tokenizer-mode=auto,hf --hf-config-path --quantization-config={} --logprobs-mode=raw_logprobs "
        "--config-format=auto,hf --model-class-overrides={} --sleep-preserve-parameter-names --model-impl=auto,vllm "
        "--logits-processors --io-processor-plugin --renderer-num-workers=1 --model-loader-extra-config={} "
        "--reasoning-parser-plugin --decode-context-parallel-size|-dcp=1 --prefill-context-parallel-size|-pcp=1 "
        "--dcp-kv-cache-interleave-size=1 --cp-kv-cache-interleave-size --elastic-ep-max-dp-size "
        "--fault-tolerance-config --worker-cls=auto --worker-extension-cls --kv-cache-dtype-skip-layers "
        "--kv-offloading-backend=native --cpu-offload-gb=0 --offload-backend=auto --cpu-offload-params "
        "--offload-group-size=0 --offload-num-in-group=1 --offload-prefetch-step=1 --offload-params "
        "--media-io-kwargs={} --mm-processor-kwargs={} --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path "
        "--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --video-pruning-rate=0 "
        "--video-pruning-method --lora-target-modules --default-mm-loras --lora-dtype=auto --logging-config "
        "--log-config-file --per-request-spec-decode-metrics=none --scheduler-cls --prefill-schedule-interval=1 "
        "--watermark-config --diffusion-config|-dc --kv-transfer-config --kv-events-config --ec-transfer-config "
        "--ec-manager-config --engram-config --additional-config={} --structured-outputs-config={} "
        "--aux-output-config --profiler-config --weight-transfer-config --performance-mode=balanced --root-path --uds "
        "--data-parallel-backend|-dpb=mp --num-scheduler-steps=1 --scheduler-delay-factor=0,0.0 "
        "--max-num-partial-prefills=1 --max-long-partial-prefills=1 --override-neuron-config --override-pooler-config "
        "--pooler-config --max-prompt-adapters --max-prompt-adapter-token --prompt-adapters "
        "--qlora-adapter-name-or-path --num-redundant-experts=0 --eplb-window-size --eplb-step-interval"
    ),
}
"""What to do instead → flags with a value that are rejected, and after `=` the values that change nothing."""


def vllm_flags() -> list[VllmFlag]:
    """Return the table."""
    return [
        *_entries(IGNORED_SWITCHES, is_switch=True, is_ignored=True),
        *_entries(IGNORED_VALUES, is_switch=False, is_ignored=True),
        *_entries(REJECTED_SWITCHES, is_switch=True, is_ignored=False),
        *_entries(REJECTED_VALUES, is_switch=False, is_ignored=False),
    ]


def _entries(table: dict[str, str], *, is_switch: bool, is_ignored: bool) -> Iterable[VllmFlag]:
    for reason, flags in table.items():
        for item in flags.split():
            names, _, harmless = item.partition("=")
            values = tuple(harmless.split(",")) if harmless else ()
            yield VllmFlag(tuple(names.split("|")), is_switch, reason, is_ignored, values)


class OtherFlag(UnsupportedFlag):
    """Collect rejected and ignored flags in the namespace; the parser reports them together."""

    entry: VllmFlag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        entry, flag = self.entry, option_string or ""
        if entry.is_ignored:
            _collect(namespace, "ignored_flags", f"{flag} has no effect: {entry.reason}")
        elif entry.is_switch and flag.startswith("--no-"):
            return
        elif (values or None) not in entry.harmless:
            only = f" other than {' or '.join(entry.harmless)}" if entry.harmless else ""
            _collect(namespace, "rejected_flags", f"{flag}{only} is not supported; {entry.reason}")


def _collect(namespace: argparse.Namespace, name: str, message: str) -> None:
    setattr(namespace, name, [*(getattr(namespace, name, None) or ()), message])


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Register vLLM's other flags, hidden from --help. A flag that the parser already has is left out.

    Each switch of the parser gets the form --no-x, as in vLLM.
    """
    for entry in vllm_flags():
        flag = entry.names[0]
        if flag in parser._option_string_actions:
            continue
        names = [*entry.names, f"--no-{flag.removeprefix('--')}"] if entry.is_switch else entry.names
        nargs: int | str = 0 if entry.is_switch else "?"
        action = parser.add_argument(
            *names, action=OtherFlag, nargs=nargs, metavar="VALUE", help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )
        assert isinstance(action, OtherFlag)
        action.entry = entry
    for action in list(parser._actions):
        off = f"--no-{action.option_strings[0].removeprefix('--')}" if action.option_strings else ""
        if isinstance(action, argparse._StoreTrueAction) and off not in parser._option_string_actions:
            parser.add_argument(
                off, dest=action.dest, action="store_false", help=argparse.SUPPRESS, default=argparse.SUPPRESS
            )
