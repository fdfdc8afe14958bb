"""Groups of ranks that compute together: collectives over torch.distributed, counted in bytes on the wire.

gloo on the CPU, NCCL on CUDA; a group whose backend knows only host memory stages a device's tensors through it.
Counted is what a rank sends in a ring, whatever the backend's own algorithm, for n ranks with s bytes each; and at both
ends what goes one way only:

all_reduce 2 s (n-1)/n · all_gather s (n-1) · reduce_scatter s (n-1)/n of the whole s · point to point s · gather s,
on the rank that gathers s (n-1)
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(slots=True)
class WireMeter:
    """Bytes on this rank's wire, by kind of collective."""

    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + num_bytes

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        sent, self.sent_bytes = self.sent_bytes, {}
        return sent


class RankGroup:
    """One process group as one of its ranks sees it. `ranks` are global; `index` is this rank's place among them."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, meter: WireMeter) -> None:
        self._group, self._ranks, self._meter = group, ranks, meter
        self.size, self.index = len(ranks), ranks.index(rank)
        self._stages_on_host = dist.get_backend(group) == "gloo"

    @property
    def device(self) -> str:
        """Where a tensor best lies that is made to be sent."""
        return "cpu" if self._stages_on_host else "cuda"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; x is returned."""
        self._meter.add("all_reduce", 2 * x.nbytes * (self.size - 1) // self.size)
        wire = self._to_wire(x)
        dist.all_reduce(wire, group=self._group)
        return x if wire is x else x.copy_(wire)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] of each rank -> [size * rows, ...] in the order of the ranks. Shapes are equal."""
        self._meter.add("all_gather", x.nbytes * (self.size - 1))
        wire = self._to_wire(x)
        whole = wire.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather(list(whole.chunk(self.size)), wire, group=self._group)
        return whole.to(x.device)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * rows, ...] of each rank -> the sum's own rows, [rows, ...]."""
        self._meter.add("reduce_scatter", x.nbytes * (self.size - 1) // self.size)
        wire = self._to_wire(x)
        own = wire.new_empty(x.shape[0] // self.size, *x.shape[1:])
        dist.reduce_scatter(own, list(wire.chunk(self.size)), group=self._group)
        return own.to(x.device)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] of each rank -> [rows, size * columns] on the first, None on the others."""
        wire = self._to_wire(x)
        if self.index:
            self._meter.add("gather", x.nbytes)
            dist.gather(wire, None, self._ranks[0], group=self._group)
            return None
        self._meter.add("gather", x.nbytes * (self.size - 1))
        parts = [torch.empty_like(wire) for _ in self._ranks]
        dist.gather(wire, parts, self._ranks[0], group=self._group)
        return torch.cat(parts, dim=1).to(x.device)

    def send(self, x: torch.Tensor, index: int) -> None:
        """To the rank at this place of the group."""
        self._meter.add("point_to_point", x.nbytes)
        dist.send(self._to_wire(x), self._ranks[index], group=self._group)

    def receive(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Into x, from the rank at this place of the group."""
        self._meter.add("point_to_point", x.nbytes)
        wire = torch.empty_like(x, device="cpu") if self._stages_on_host and x.device.type != "cpu" else x
        dist.recv(wire, self._ranks[index], group=self._group)
        return x if wire is x else x.copy_(wire)

    def exchange(self, outgoing: dict[int, torch.Tensor], sizes: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Bytes to and from other places of the group, all at once. `sizes`: what comes from whom. Every rank that one
        names must name it as well."""
        incoming = {index: torch.empty(size, dtype=torch.uint8, device=self.device) for index, size in sizes.items()}
        work = [
            dist.P2POp(dist.isend, self._to_wire(x), self._ranks[index], self._group) for index, x in outgoing.items()
        ]
        work += [dist.P2POp(dist.irecv, x, self._ranks[index], self._group) for index, x in incoming.items()]
        for request in dist.batch_isend_irecv(work) if work else []:
            request.wait()
        self._meter.add("expert_weights", sum(x.nbytes for x in (*outgoing.values(), *incoming.values())))
        return incoming

    def _to_wire(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        return x.cpu() if self._stages_on_host else x


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups that one rank belongs to; None where it would be alone."""

    tensor: RankGroup | None = None
    pipeline: RankGroup | None = None
    data: RankGroup | None = None
    """Ranks with the same heads in other data-parallel copies; only where a mixture of experts spans them."""
    expert: RankGroup | None = None
    """Ranks that share whole experts: all data x tensor ranks of a stage, with expert parallelism."""


ALONE = RankGroups()
