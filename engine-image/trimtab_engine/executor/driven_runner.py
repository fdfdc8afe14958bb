"""Runner of the engine core's rank, which mirrors its operations to all other ranks."""

import torch

from trimtab_engine.device.kv_cache import KVLayers
from trimtab_engine.device.swap_cache import SwapCache
from trimtab_engine.errors import ConfigError
from trimtab_engine.executor.block_table_deltas import BlockTableSender
from trimtab_engine.executor.messages import (
    AdapterLoaded,
    DropWeights,
    ForgetAdapter,
    GetLedger,
    InitKvCache,
    InitSwapSpace,
    LedgerReport,
    LoadAdapter,
    Mapped,
    Reloaded,
    ReloadWeights,
    Step,
    UseWeights,
)
from trimtab_engine.executor.workers import Workers
from trimtab_engine.memory.formula import Ledger
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.wave import Wave
from trimtab_engine.runner.decode_step import DecodeStep
from trimtab_engine.runner.graphs.step_buffers import Feed
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.runner.weights import WeightsUnavailable
from trimtab_engine.scheduling.step_inputs import StepInputs, StepShape


class DrivenRunner(ModelRunner):
    """A ModelRunner whose steps and KV cache operations reach every rank. Call drive() first."""

    drives_others = True

    def drive(self, workers: Workers, groups: RankGroups, max_num_seqs: int) -> None:
        """Take the other ranks along from now on, in step with the cores that this one's are in lockstep with. A step
        has at most `max_num_seqs` sequences.
        """
        self.workers, self._meter = workers, groups.meter
        self.table_sender = BlockTableSender(len(self.facts.kv_groups), max_num_seqs, self._block_size)
        self.wave = None if groups.lockstep is None else Wave(groups.lockstep)
        # A sleeping core computes padding for awake ones, which needs its weights.
        self.can_drop_weights = self.wave is None

    def take_wire_bytes(self) -> dict[str, int]:
        """Return the bytes sent by this rank since the last call, by kind of collective."""
        return self._meter.take()

    def ledgers(self, own: Ledger) -> dict[int, Ledger]:
        """Return the ledgers of all ranks of this core, by rank. Each rank answers after its earlier messages."""
        self.workers.send(GetLedger(own.blocks_used))
        told = {answer.rank: answer.ledger for answer in self.workers.answers(LedgerReport)}
        return {self.workers.rank: own} | told

    def close(self) -> None:
        """End the other ranks."""
        super().close()
        self.workers.close()

    def send(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> None:
        """Start the step on the other ranks immediately. Earlier pipeline stages run ahead of this one."""
        assert isinstance(inputs, StepInputs)  # lay_out() returns StepInputs when it drives other ranks
        if self.wave is not None:
            try:
                inputs.agreed = self._agree(self.wave, inputs)
            except RuntimeError as error:  # torch's, when another core has ended
                raise self.workers.cause_of(error) from error
            if inputs.agreed.num_tokens == 0:
                return  # no core has work: the wave is over
        self.workers.send(Step(*self.table_sender.extract_deltas(inputs), list(feed)))

    def _agree(self, wave: Wave, inputs: StepInputs) -> StepShape:
        """Agree on a step shape with the other cores. A sleeping core has no block that the padding of a uniform step
        could read.
        """
        own = inputs.shape
        if self.steps is None:
            own = StepShape(self.padded_rows(inputs), own.tokens_per_sequence)
        return wave.agree(own, can_be_uniform=self.kv_cache.num_blocks > 0)

    def run(self, inputs: StepInputs | DecodeStep, feed: Feed = ()) -> torch.Tensor | None:
        """Run this rank's part of a step, in the order of sending."""
        if isinstance(inputs, StepInputs) and inputs.agreed is not None and inputs.agreed.num_tokens == 0:
            return torch.empty(0, self.facts.vocab_size)
        try:
            return super().run(inputs, feed)
        except RuntimeError as error:  # torch's, when a connection to another rank breaks
            raise self.workers.cause_of(error) from error

    def drop_weights(self) -> None:
        """Release the weights of every rank."""
        self.workers.send(DropWeights())
        super().drop_weights()

    def reload_weights(self) -> None:
        """Reload the weights on every rank at the same time.

        Raises:
            WeightsUnavailable: If some ranks cannot; names them and leaves no weights on any.
        """
        self.workers.send(ReloadWeights())
        own: WeightsUnavailable | None = None
        try:
            self.read_weights()
        except WeightsUnavailable as error:
            own = error
        answers = self.workers.answers(Reloaded)
        failures = [f"rank {answer.rank}: {answer.error}" for answer in answers if answer.error]
        failures += [] if own is None else [f"rank {self.workers.rank}: {own}"]
        if failures:
            self.workers.send(DropWeights())
            if own is None:
                super().drop_weights()
            raise WeightsUnavailable("; ".join(failures))
        own_slots = {each.adapter.slot for each in self.adapters}
        read = [own_slots, *(set(answer.adapters) for answer in answers)]
        for slot in own_slots.union(*read) - own_slots.intersection(*read):
            self.forget_adapter(slot)
        self.workers.send(UseWeights())
        self.use_weights()

    def load_adapter(self, slot: int, name: str, folder: str) -> bytes:
        """Load the adapter on every rank.

        Raises:
            ConfigError: If a rank cannot read it or finds different files. The slot stays unused.
        """
        self.workers.send(LoadAdapter(slot, name, folder))
        own: Exception | None = None
        try:
            digest = super().load_adapter(slot, name, folder)
        except Exception as error:  # raised after all ranks have answered, so that no answer is left over
            own = error
        answers = self.workers.answers(AdapterLoaded)
        if own is not None:
            raise own
        for answer in answers:
            if answer.error:
                raise ConfigError(f"rank {answer.rank}: {answer.error}")
            if answer.digest != digest:
                raise ConfigError(
                    f"adapter {name}: rank {answer.rank} finds other files in {folder} than this rank; give all nodes "
                    f"the same ones"
                )
        return digest

    def forget_adapter(self, slot: int) -> None:
        """Mark the slot as unused on every rank."""
        self.workers.send(ForgetAdapter(slot))
        super().forget_adapter(slot)

    def init_kv_cache(self, cap_blocks: int, draft: KVLayers | None = None) -> None:
        """Reserve the KV cache on every rank and mirror later changes. A draft model's layers are on this rank only."""
        self.workers.send(InitKvCache(cap_blocks))
        super().init_kv_cache(cap_blocks, draft)
        self.kv_cache.mirror = self.workers.send
        self.kv_cache.failures_elsewhere = self._failures_to_map

    def _failures_to_map(self) -> list[str]:
        return [f"rank {answer.rank}: {answer.error}" for answer in self.workers.answers(Mapped) if answer.error]

    def new_swap_cache(self, num_blocks: int) -> SwapCache:
        """Allocate as many host blocks on every rank; each swaps its own part of a block."""
        self.workers.send(InitSwapSpace(num_blocks))
        swap_cache = super().new_swap_cache(num_blocks)
        swap_cache.mirror = self.workers.send
        return swap_cache
