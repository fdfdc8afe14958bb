"""Start-up of steps on CUDA after the KV cache has its addresses: fixed inputs, kernel compilation, graph capture, and
their memory. With several ranks all do this at the same time, in one order.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab_kernels.launch.jit import watch_compilations
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.memory.formula import GIB
from trimtab_engine.runner.graphs.device_steps import DeviceSteps
from trimtab_engine.runner.graphs.plan import NO_GRAPHS, GraphPlan, graph_plan
from trimtab_engine.runner.graphs.recorder import CudaRecorder, Recorder
from trimtab_engine.runner.model_runner import ModelRunner

GRAPHS_STAGE = "graphs"
"""The stage's name at /startupz."""
NUM_MEASURED_GRAPHS = 2  # graphs from which the memory of the others is estimated
MIN_GRAPH_BYTES = 1 << 20  # minimum bytes of a further graph; vLLM's value
Report = Callable[[float], None]

logger = logging.getLogger("trimtab_engine.core")


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Bytes of fixed inputs and graphs. Lazily captured graphs are estimated, the others measured."""

    buffer_bytes: int
    graphs_bytes: int

    def added_to(self, formula: MemoryFormula) -> MemoryFormula:
        """Return the formula with this memory; the buffers count as workspace."""
        return replace(
            formula,
            workspace_bytes=formula.workspace_bytes + self.buffer_bytes,
            graphs_bytes=formula.graphs_bytes + self.graphs_bytes,
        )


def recorder_of(device: Device) -> Recorder | None:
    """Return the graph recorder of this device. None if the host computes steps."""
    return CudaRecorder(device.torch) if device.kind == "cuda" else None


def has_device_steps(device: Device) -> bool:
    """Return True if the device works asynchronously."""
    return recorder_of(device) is not None


def start_device_steps(
    config: EngineConfig, device: Device, runner: ModelRunner, progress: Report
) -> GraphMemory | None:
    """Switch this rank to device steps. Return their memory; None on the CPU. `progress` receives percent of this
    stage.
    """
    recorder = recorder_of(device)
    if recorder is None:
        _note_without_graphs(config)
        return None
    plan = plan_for(config, can_capture=runner.groups.can_capture(device.torch))
    began, before = time.monotonic(), device.used_bytes()
    watch_compilations()
    steps = runner.use_device_steps(config, plan, recorder)
    steps.warm_up()
    after_warm_up = device.used_bytes()
    estimate = _capture(steps, plan, device, progress)
    graphs_bytes = estimate if plan.is_lazy else max(0, device.used_bytes() - after_warm_up)
    if plan.keys:
        taken = (device.used_bytes() - before) / GIB
        logger.info("Graph capturing finished in %.0f secs, took %.2f GiB", time.monotonic() - began, taken)
        logger.info(
            "CUDA graph pool memory: %.2f GiB (actual), %.2f GiB (estimated)", graphs_bytes / GIB, estimate / GIB
        )
    return GraphMemory(steps.num_bytes, graphs_bytes)


def plan_for(config: EngineConfig, *, can_capture: bool) -> GraphPlan:
    """Return the configured graphs, equal on all ranks. Ranks that share a GPU get none: they wait for the host, and a
    graph cannot.
    """
    plan = graph_plan(config)
    if can_capture or not plan.keys:
        return plan
    logger.warning(
        "there are fewer GPUs than ranks, so these talk through host memory, which no CUDA graph can contain: every "
        "step is eager; give each rank a GPU, or set --enforce-eager"
    )
    return NO_GRAPHS


def _capture(steps: DeviceSteps, plan: GraphPlan, device: Device, progress: Report) -> int:
    """Capture the plan's graphs, lazily only the largest. Returns the memory estimated from those: vLLM's estimate."""
    num_graphs = len(plan.keys)
    grown: list[int] = []
    for count in range(1, min(NUM_MEASURED_GRAPHS, num_graphs) + 1):
        before = device.used_bytes()
        steps.capture_all(lambda done, of: None, most=1)
        grown.append(max(0, device.used_bytes() - before))
        progress(100.0 * count / num_graphs)
    if not plan.is_lazy:
        measured = len(grown)
        steps.capture_all(lambda done, of: progress(100.0 * (measured + done) / num_graphs))
    return estimated_bytes(grown, num_graphs)


def estimated_bytes(grown: list[int], num_graphs: int) -> int:
    """Estimate the memory of `num_graphs` graphs from the first ones: the first allocates the pool, further ones add to
    it.
    """
    if not grown:
        return 0
    further = grown[1] if len(grown) > 1 else 0
    return grown[0] + (num_graphs - 1) * max(further, MIN_GRAPH_BYTES)


def _note_without_graphs(config: EngineConfig) -> None:
    """Log a warning if graphs were requested but are not possible."""
    default = EngineConfig(model=config.model)
    is_asked = (config.optimization_level, config.compilation) != (default.optimization_level, default.compilation)
    if is_asked and not config.enforce_eager:
        logger.warning("the CPU has no CUDA graphs: -O and --compilation-config change nothing here")
