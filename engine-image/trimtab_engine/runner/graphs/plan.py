"""Plan of the CUDA graphs: mode and sizes in tokens, from the configuration. Pure.

Sizes are vLLM's list: 1, 2, 4, then every 8 up to 256, then every 16 up to min(2 x max_num_seqs x (1 + drafts), 512),
and none above the token budget. Whole-decode graphs end at the first size that holds every request, extended in steps
of one eighth, so that no decode step is eager because of its size; with speculation they are also captured at multiples
of 1 + drafts. With adapters every graph exists twice, with adapter matmuls and without.
"""

from dataclasses import dataclass

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import MODES_BY_LEVEL, CompilationConfig, CUDAGraphMode

MAX_DEFAULT_SIZE = 512  # tokens; vLLM's. Beyond it a mixed step's kernels take longer than their launches
SIZES_PER_DOUBLING = 8  # of whole-decode graphs beyond it: an eighth of a step at most is padding
FINE_STEP, COARSE_STEP, FINE_END = 8, 16, 256  # tokens between two sizes, up to FINE_END and above


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Key of one graph: `num_tokens` rows. `tokens_per_sequence` of a whole-decode graph; None for a piecewise graph,
    which runs attention between its pieces and so fits any batch.
    """

    num_tokens: int
    tokens_per_sequence: int | None = None
    with_adapters: bool = False
    """True if rows may have adapters."""

    @property
    def kind(self) -> str:
        """Kind of the graph: full or piecewise."""
        return "piecewise" if self.tokens_per_sequence is None else "full"


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Graphs to capture. piecewise and full: increasing sizes in tokens; full by tokens per sequence."""

    mode: CUDAGraphMode
    piecewise: tuple[int, ...] = ()
    full: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(tokens per sequence, sizes): 1 for plain decode, 1 + drafts for verifying a full set of them."""
    is_lazy: bool = False
    with_adapters: bool = False

    @property
    def keys(self) -> list[GraphKey]:
        """Every graph in the order of capture: the largest first, so that the smaller ones fit into its memory."""
        kinds = (False, True) if self.with_adapters else (False,)
        mixed = [GraphKey(size, None, kind) for size in self.piecewise for kind in kinds]
        decode = [GraphKey(size, tokens, kind) for tokens, sizes in self.full for size in sizes for kind in kinds]
        return sorted(mixed, reverse=True) + sorted(decode, key=lambda key: -key.num_tokens)

    @property
    def max_tokens(self) -> int:
        """Rows of the largest graph; 0 without graphs."""
        return max((key.num_tokens for key in self.keys), default=0)


NO_GRAPHS = GraphPlan(CUDAGraphMode.NONE)


def graph_plan(config: EngineConfig) -> GraphPlan:
    """Return the CUDA graphs of this engine; none on the CPU."""
    return cuda_graph_plan(config) if config.device == "cuda" else NO_GRAPHS


def cuda_graph_plan(config: EngineConfig) -> GraphPlan:
    """Return the graphs that the flags select on CUDA."""
    return plan_graphs(
        config.compilation,
        enforce_eager=config.enforce_eager,
        optimization_level=config.optimization_level,
        max_num_seqs=config.max_num_seqs_cap,
        max_num_batched_tokens=config.max_num_batched_tokens_cap,
        num_drafts=config.num_speculative_tokens_cap,
        with_adapters=config.adapters is not None,
    )


def plan_graphs(
    compilation: CompilationConfig,
    *,
    enforce_eager: bool,
    optimization_level: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_drafts: int,
    with_adapters: bool = False,
) -> GraphPlan:
    """Return the graphs for these caps. --enforce-eager overrides a level and an explicit mode."""
    mode = compilation.cudagraph_mode or MODES_BY_LEVEL[optimization_level]
    sizes = capture_sizes(
        compilation,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_drafts=num_drafts,
    )
    if enforce_eager or mode is CUDAGraphMode.NONE or not sizes:
        return NO_GRAPHS
    full: list[tuple[int, tuple[int, ...]]] = []
    if mode.has_full:
        for tokens in sorted({1, 1 + num_drafts}):
            further = () if compilation.has_written_sizes else sizes_beyond(max(sizes), max_num_seqs * tokens)
            own = decode_sizes((*sizes, *further), tokens, max_num_seqs, max_num_batched_tokens)
            full += [(tokens, own)] if own else []
    pieces, is_lazy = sizes if mode.has_piecewise else (), compilation.cudagraph_lazy_capture
    return GraphPlan(mode, pieces, tuple(full), is_lazy, with_adapters)


def capture_sizes(
    compilation: CompilationConfig, *, max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int = 0
) -> tuple[int, ...]:
    """Return the sizes in tokens, increasing: the configured ones or the default list, none above the token budget."""
    written = compilation.cudagraph_capture_sizes
    if written is not None:
        return tuple(sorted({size for size in written if size <= max_num_batched_tokens}))
    largest = compilation.max_cudagraph_capture_size
    if largest is None:
        largest = min(2 * max_num_seqs * (1 + num_drafts), MAX_DEFAULT_SIZE)
    largest = min(largest, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(FINE_STEP, FINE_END, FINE_STEP), *range(FINE_END, largest + 1, COARSE_STEP), largest}
    return tuple(sorted(size for size in sizes if 1 <= size <= largest))


def sizes_beyond(size: int, most: int) -> tuple[int, ...]:
    """Return sizes above `size`, up to the first that is `most` or more."""
    sizes = []
    while MAX_DEFAULT_SIZE <= size < most:
        size += (1 << size.bit_length() - 1) // SIZES_PER_DOUBLING
        sizes.append(size)
    return tuple(sizes)


def decode_sizes(
    sizes: tuple[int, ...], tokens_per_sequence: int, max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Return sizes of whole-decode graphs: multiples of tokens_per_sequence, up to the first that holds
    every request.
    """
    most = min(max_num_seqs * tokens_per_sequence, max_num_batched_tokens // tokens_per_sequence * tokens_per_sequence)
    rounded = sorted({-(-size // tokens_per_sequence) * tokens_per_sequence for size in sizes})
    # A size above `most` is cut to it: no batch is larger, and no row is computed for nothing.
    return tuple(sorted({min(size, most) for size in rounded})) if most else ()
