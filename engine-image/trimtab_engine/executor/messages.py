"""Messages between the engine core and its workers: msgspec structs over ZMQ, never pickle."""

import msgspec
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.kv_commands import CopyBlocks, MapBlocks, SwapBlocks, UnmapAbove
from trimtab_engine.executor.block_table_deltas import BlockTableDelta
from trimtab_engine.memory.formula import Ledger
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.scheduling.step_inputs import StepInputs

# --- on a worker's standard input -----------------------------------------------------------------------------------


class WorkerStart(msgspec.Struct, frozen=True):
    """All that a worker's process needs. `process` counts the engine's processes over its nodes, the core being 0."""

    config: EngineConfig
    layout: Layout
    process: int
    local_index: int
    local_count: int
    """Ranks on this node, among them the core's own where it runs here."""
    rendezvous: str
    """file:PATH on one node, tcp:HOST:PORT across nodes."""


# --- engine core -> worker ------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, tag="welcome"):
    """Answer to Hello: the rank is assigned. Commands to all ranks follow from `steps`, first Join."""

    steps: str


class RankTaken(msgspec.Struct, tag="taken"):
    """The other answer to Hello: `holder` has this rank."""

    holder: str


class Join(msgspec.Struct, tag="join"):
    """Every rank is there: join the groups."""


class Profile(msgspec.Struct, tag="profile"):
    """Run the largest steps of the envelope, as every rank does now, and answer with Profiled."""


class InitKvCache(msgspec.Struct, tag="init_kv"):
    cap_blocks: int


class InitSwapSpace(msgspec.Struct, tag="init_swap"):
    """Host blocks, as many on every rank."""

    num_blocks: int


class StartSteps(msgspec.Struct, tag="start_steps"):
    """Create this device's steps: fixed inputs, and graphs, which all ranks capture at the same time. Answered with
    StartedSteps. `max_model_len` is the served length, which the core may have reduced.
    """

    max_model_len: int


class DropWeights(msgspec.Struct, tag="drop_weights"):
    """Release the weights' memory. No step follows before ReloadWeights."""


class ReloadWeights(msgspec.Struct, tag="reload_weights"):
    """Read them again, and answer with Reloaded. UseWeights or DropWeights follows."""


class UseWeights(msgspec.Struct, tag="use_weights"):
    """All ranks have read the weights: prepare steps with them."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Read an adapter into an unused slot. Answered with AdapterLoaded."""

    slot: int
    name: str
    folder: str


class ForgetAdapter(msgspec.Struct, tag="forget_adapter"):
    """Mark the slot as unused."""

    slot: int


class Step(msgspec.Struct, tag="step"):
    """A step: `inputs` without block tables, and `tables` with one delta per KV group. `feed`: (index in token_ids,
    row) of tokens sampled by the previous step, which the core's rank sends on the device.
    """

    inputs: StepInputs
    tables: list[BlockTableDelta]
    feed: list[tuple[int, int]] = []


class GetLedger(msgspec.Struct, tag="ask_ledger"):
    """Answer with LedgerReport. The core knows how many KV blocks are in use."""

    blocks_used: int


class Stop(msgspec.Struct, tag="stop"):
    """Leave; nothing is answered."""


ToHello = Welcome | RankTaken
ToWorker = (
    Join
    | Profile
    | InitKvCache
    | MapBlocks
    | UnmapAbove
    | CopyBlocks
    | InitSwapSpace
    | SwapBlocks
    | StartSteps
    | UseWeights
    | DropWeights
    | ReloadWeights
    | LoadAdapter
    | ForgetAdapter
    | Step
    | GetLedger
    | Stop
)


# --- worker -> engine core ------------------------------------------------------------------------------------------


class RankReport(msgspec.Struct, frozen=True):
    """Actual placement and shard of one rank: a row of GET /admin/v1/layout. Layers are [first, last]."""

    rank: int
    host: str
    pid: int
    device: str
    data: int
    stage: int
    tensor: int
    layers: tuple[int, int]
    heads: int
    kv_heads: int
    experts: tuple[int, ...] = ()


class Hello(msgspec.Struct, tag="hello"):
    """The worker runs and requests its rank."""

    rank: int
    host: str
    pid: int


class RankLoaded(msgspec.Struct, tag="loaded"):
    report: RankReport


class Profiled(msgspec.Struct, tag="profiled"):
    rank: int
    formula: MemoryFormula


class StartedSteps(msgspec.Struct, tag="started_steps"):
    """Device memory of this rank's fixed inputs and graphs, in bytes."""

    rank: int
    buffer_bytes: int
    graphs_bytes: int


class Mapped(msgspec.Struct, tag="mapped"):
    """The answer to MapBlocks. `error`: why this rank could not; then nothing has changed there."""

    rank: int
    error: str = ""


class Reloaded(msgspec.Struct, tag="reloaded"):
    """The answer to ReloadWeights. `error`: why this rank could not; then it has none. `adapters`: the slots of the
    adapters that it has read.
    """

    rank: int
    error: str = ""
    adapters: list[int] = []


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """The answer to LoadAdapter: SHA-256 of the files that this rank has read. `error`: why it could not; then nothing
    has changed there.
    """

    rank: int
    digest: bytes = b""
    error: str = ""


class LedgerReport(msgspec.Struct, tag="ledger"):
    rank: int
    ledger: Ledger


class WorkerFailed(msgspec.Struct, tag="failed"):
    """The last word of a worker that cannot go on. Exit code 2: the user must act."""

    rank: int
    message: str
    exit_code: int


class RankAlive(msgspec.Struct, tag="alive"):
    """Sent every HEARTBEAT_SECONDS, and answered by the same."""

    rank: int


FromWorker = (
    Hello
    | RankLoaded
    | Profiled
    | StartedSteps
    | Mapped
    | Reloaded
    | AdapterLoaded
    | LedgerReport
    | WorkerFailed
    | RankAlive
)

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # without a word the other side is taken for dead; the rest of 10 s is for the engine to end
