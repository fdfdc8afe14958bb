"""The engine core's own rank, with the others at its side: what it computes, it has them compute as well."""

import torch

from trimtab_engine.kv_cache import KVLayers
from trimtab_engine.memory import Ledger
from trimtab_engine.model_runner import ModelRunner
from trimtab_engine.parallel.groups import RankGroup, WireMeter
from trimtab_engine.parallel.wave import Wave
from trimtab_engine.parallel.wire_messages import AskLedger, InitKvCache, InitSwapSpace, Step, ToldLedger
from trimtab_engine.parallel.workers import Workers
from trimtab_engine.step_inputs import StepInputs
from trimtab_engine.swap_cache import SwapCache


class DrivenRunner(ModelRunner):
    """A ModelRunner whose steps and KV cache operations reach every rank. drive() comes before the first of them."""

    can_drop_weights = False
    drives_others = True

    def drive(self, workers: Workers, meter: WireMeter, lockstep: RankGroup | None) -> None:
        """Take the other ranks along from now on; with `lockstep`, in step with that group's cores."""
        self.workers, self._meter = workers, meter
        self.wave = None if lockstep is None else Wave(lockstep)

    def take_wire_bytes(self) -> dict[str, int]:
        """What went over this rank's wire since the last call, by kind of collective."""
        return self._meter.take()

    def ledgers(self, own: Ledger) -> dict[int, Ledger]:
        """Of every rank of this core, by rank. Each answers when it has done what it was sent before."""
        self.workers.send(AskLedger(own.blocks_used))
        told = {answer.rank: answer.ledger for answer in self.workers.answers(ToldLedger)}
        return {self.workers.rank: own} | told

    def close(self) -> None:
        """End the other ranks."""
        self.workers.close()

    def send(self, inputs: StepInputs) -> None:
        """The other ranks begin at once. Stages before this one's run ahead of it."""
        if self.wave is not None:
            try:
                inputs.num_rows = self.wave.agree_on_rows(self.padded_rows(inputs))
            except RuntimeError as error:  # torch's, when another core has ended
                raise self.workers.cause_of(error) from error
            if inputs.num_rows == 0:
                return  # no core has work: the wave is over
        self.workers.send(Step(inputs))

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """This rank's part of a step; steps are run in the order in which they were sent."""
        if self.wave is not None and inputs.num_rows == 0:
            return torch.empty(0, self.facts.vocab_size)
        try:
            return super().run(inputs)
        except RuntimeError as error:  # torch's, when a connection to another rank breaks
            raise self.workers.cause_of(error) from error

    def init_kv_cache(self, cap_blocks: int, draft: KVLayers | None = None) -> None:
        """Reserve it on every rank; later changes follow. A draft model's layers are on this rank alone."""
        self.workers.send(InitKvCache(cap_blocks))
        super().init_kv_cache(cap_blocks, draft)
        self.kv_cache.mirror = self.workers.send

    def new_swap_cache(self, num_blocks: int) -> SwapCache:
        """As many host blocks on every rank, which swaps its own part of each."""
        self.workers.send(InitSwapSpace(num_blocks))
        swap_cache = super().new_swap_cache(num_blocks)
        swap_cache.mirror = self.workers.send
        return swap_cache
