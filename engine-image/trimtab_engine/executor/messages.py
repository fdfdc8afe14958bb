"""What the engine core and the workers of its ranks say to each other: msgspec structs over ZMQ, never pickle."""

import msgspec
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.changes import CopyBlocks, MapBlocks, SwapBlocks, UnmapAbove
from trimtab_engine.executor.block_table_deltas import ToldTables
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
    """The answer to Hello: the rank is yours. What all ranks do comes from `steps`, first Join."""

    steps: str


class Taken(msgspec.Struct, tag="taken"):
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
    """Make this device's steps: fixed inputs, and graphs, which all ranks capture at once. Answer with StartedSteps.

    `max_model_len` is what is served: the core may have cut it to what fits.
    """

    max_model_len: int


class DropWeights(msgspec.Struct, tag="drop_weights"):
    """Give their memory back. No step comes before ReloadWeights."""


class ReloadWeights(msgspec.Struct, tag="reload_weights"):
    """Read them again, and answer with Reloaded."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Read an adapter into a slot that nobody uses, and answer with AdapterLoaded."""

    slot: int
    name: str
    folder: str


class ForgetAdapter(msgspec.Struct, tag="forget_adapter"):
    """Nobody uses the slot's adapter any more."""

    slot: int


class Step(msgspec.Struct, tag="step"):
    """`inputs` without block tables, which `tables` tell of, a group each. `feed`: (index in token_ids, row) of the
    tokens that the step before sampled, which the core's rank hands to the others on the device."""

    inputs: StepInputs
    tables: list[ToldTables]
    feed: list[tuple[int, int]] = []


class AskLedger(msgspec.Struct, tag="ask_ledger"):
    """Answer with ToldLedger. The core knows how many KV blocks are in use."""

    blocks_used: int


class Stop(msgspec.Struct, tag="stop"):
    """Leave; nothing is answered."""


ToHello = Welcome | Taken
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
    | DropWeights
    | ReloadWeights
    | LoadAdapter
    | ForgetAdapter
    | Step
    | AskLedger
    | Stop
)


# --- worker -> engine core ------------------------------------------------------------------------------------------


class RankReport(msgspec.Struct, frozen=True):
    """What one rank really is and holds: a row of GET /admin/v1/layout. Layers are [first, last]."""

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
    """The worker runs and asks for its rank."""

    rank: int
    host: str
    pid: int


class RankLoaded(msgspec.Struct, tag="loaded"):
    report: RankReport


class Profiled(msgspec.Struct, tag="profiled"):
    rank: int
    formula: MemoryFormula


class StartedSteps(msgspec.Struct, tag="started_steps"):
    """What fixed inputs and graphs take of this rank's device, in bytes."""

    rank: int
    buffer_bytes: int
    graphs_bytes: int


class Mapped(msgspec.Struct, tag="mapped"):
    """The answer to MapBlocks. `error`: why this rank could not; then nothing has changed there."""

    rank: int
    error: str = ""


class Reloaded(msgspec.Struct, tag="reloaded"):
    """The answer to ReloadWeights. `error`: why this rank could not; then it has none."""

    rank: int
    error: str = ""


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """The answer to LoadAdapter: SHA-256 of the files that this rank has read. `error`: why it could not; then nothing
    has changed there."""

    rank: int
    digest: bytes = b""
    error: str = ""


class ToldLedger(msgspec.Struct, tag="ledger"):
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
    | ToldLedger
    | WorkerFailed
    | RankAlive
)

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # without a word the other side is taken for dead; the rest of 10 s is for the engine to end
