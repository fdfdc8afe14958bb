"""Start-up steps of every rank, including the engine core's: memory measurement and rank reports."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.executor import remembered_profile
from trimtab_engine.executor.driven_runner import DrivenRunner
from trimtab_engine.executor.messages import (
    Profile,
    Profiled,
    RankLoaded,
    RankReport,
    StartedSteps,
    StartSteps,
)
from trimtab_engine.executor.workers import OnDeath, Workers
from trimtab_engine.memory.encoder import EncoderLimits
from trimtab_engine.memory.sizing import reserved_for_processes
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.parallel.groups import SINGLE_RANK, RankGroups
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import check_layout
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.runner.start import GraphMemory, Report, has_device_steps, start_device_steps

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class BeforeWeights:
    """Memory in use on a GPU before the weights are loaded, in bytes. On the CPU, where process sizes are not final
    yet, a rule is used instead (memory/reserved.py).
    """

    other_bytes: int = 0
    communicator_bytes: int = 0
    """Bytes of the connections between GPUs."""


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """The engine core's loaded rank, and the reports of all ranks."""

    device: Device
    runner: ModelRunner
    before: BeforeWeights
    workers: Workers | None
    reports: list[RankReport]

    def measure(self, config: EngineConfig) -> MemoryFormula:
        """Return the memory formula of all ranks, which profile at the same time."""
        if self.workers is None:
            return measure(config, self.device, self.runner, self.before, is_single=True)
        self.workers.send(Profile())
        own = measure(config, self.device, self.runner, self.before)
        others = self.workers.answers(Profiled)
        return replace(own, other_ranks=tuple(answer.formula for answer in others))

    def start_steps(self, config: EngineConfig, formula: MemoryFormula, progress: Report) -> MemoryFormula:
        """On CUDA, create fixed inputs and graphs on all ranks at the same time, because their collectives meet. Return
        the formula with their memory. `progress` receives percent of it.
        """
        if self.workers is not None and has_device_steps(self.device):
            self.workers.send(StartSteps(self.runner.facts.max_model_len))
        own = start_device_steps(config, self.device, self.runner, progress)
        if own is None:
            return formula
        if self.workers is not None:
            answers = self.workers.answers(StartedSteps)
            others = tuple(
                GraphMemory(answer.buffer_bytes, answer.graphs_bytes).added_to(other)
                for answer, other in zip(answers, formula.other_ranks, strict=True)  # both in the order of the ranks
            )
            formula = replace(formula, other_ranks=others)
        return own.added_to(formula)


def load_rank(config: EngineConfig, progress: Progress, on_rank_death: OnDeath | None) -> LoadedRank:
    """Load the engine core's rank; with several ranks start the others and wait until they have loaded, too."""
    layout = _layout_of(config)
    if layout.world_size == 1:
        device = _own_device(config)
        before = connect(SINGLE_RANK, device)
        runner = load_model_runner(ModelRunner, config, device, progress, layout=layout)
        return LoadedRank(device, runner, before, None, [rank_report(runner, device, layout, 0)])
    workers = Workers(config, layout, on_rank_death)
    try:
        return _load_driven(config, layout, workers, progress)
    except BaseException:
        workers.close()
        raise


def _own_device(config: EngineConfig) -> Device:
    """Return the core's. The node's data-parallel cores share it with all their ranks."""
    return Device(
        config.device,
        memory_bytes=config.device_memory_bytes,
        cpu_threads=config.cpu_threads,
        local_index=config.first_local_rank,
        local_count=config.num_local_ranks,
    )


def _layout_of(config: EngineConfig) -> Layout:
    """Raises ConfigError, before any process starts, for a layout that the model does not allow."""
    source = open_model(config.model, config.load_format)
    model = parse_model_config(source.config, source.generation_config, source.where)
    if model.moe is not None and config.data_parallel_world_size not in (None, config.data_parallel_size):
        raise NotSupportedError(
            "--data-parallel-rank and --data-parallel-hybrid-lb are not supported for an MoE model, whose "
            "cores step together; use --data-parallel-size with --nnodes and one API"
        )
    layout = Layout.of(config, is_moe=model.moe is not None)
    check_layout(model, layout, config.pipeline_layer_partition, config.num_redundant_experts)
    return layout


def _load_driven(config: EngineConfig, layout: Layout, workers: Workers, progress: Progress) -> LoadedRank:
    device = _own_device(config)
    progress("ranks", 0.0)
    groups = workers.join()
    before = connect(groups, device)
    runner = load_model_runner(DrivenRunner, config, device, progress, layout=layout, rank=workers.rank, groups=groups)
    assert isinstance(runner, DrivenRunner)
    runner.drive(workers, groups, config.max_num_seqs_cap)
    reports = [answer.report for answer in workers.answers(RankLoaded)]
    return LoadedRank(device, runner, before, workers, [*reports, rank_report(runner, device, layout, workers.rank)])


def connect(groups: RankGroups, device: Device) -> BeforeWeights:
    """Open the connections of a rank's groups, on all ranks at the same time, and measure GPU memory
    before and after.
    """
    if device.kind == "cpu":
        groups.connect(device.torch)
        return BeforeWeights()
    other_bytes = device.used_bytes()
    groups.connect(device.torch)
    device.settle()
    return BeforeWeights(other_bytes, max(0, device.used_bytes() - other_bytes))


def measure(
    config: EngineConfig, device: Device, runner: ModelRunner, before: BeforeWeights, *, is_single: bool = False
) -> MemoryFormula:
    """Run the largest steps and fill in the memory formula. All ranks run at the same time: their collectives meet. A
    single rank may use an earlier start's measurement.
    """
    facts, on_cpu = runner.facts, device.kind == "cpu"
    encoder = EncoderLimits.of(config, facts.max_model_len)
    other_bytes = reserved_for_processes(config, facts.vocab_size) if on_cpu else before.other_bytes
    if is_single and not runner.profile_compiles:
        activations_bytes = remembered_profile.profile(config, runner, encoder, device.num_threads)
    else:
        activations_bytes = runner.profile(config.max_num_batched_tokens_cap, config.max_num_sampled_rows, encoder)
    return MemoryFormula(
        device_bytes=device.total_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        other_bytes=other_bytes,
        weights_bytes=facts.weights_bytes,
        activations_peak_bytes=activations_bytes + runner.items_bytes(encoder, config.max_num_batched_tokens_cap),
        # On the CPU the swap space and the host cache share memory with the KV cache.
        workspace_bytes=runner.kv_rounding_bytes
        + (config.swap_space_bytes_cap + config.kv_offload_bytes_cap if on_cpu else 0),
        graphs_bytes=0,
        communicator_bytes=before.communicator_bytes,
        kv_groups=facts.kv_groups,
        kv_dtype_bytes=facts.kv_dtype_bytes,
        block_size=config.block_size,
        max_model_len=facts.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens_cap,
    )


def rank_report(runner: ModelRunner, device: Device, layout: Layout, rank: int) -> RankReport:
    """Return the actual placement and shard of this rank."""
    place, shard = layout.place(rank), runner.shard
    return RankReport(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(device.torch),
        data=place.data,
        stage=place.pipeline,
        tensor=place.tensor,
        layers=(shard.layers[0], shard.layers[1] - 1),
        heads=shard.num_heads,
        kv_heads=shard.num_kv_heads,
        experts=shard.experts,
    )
