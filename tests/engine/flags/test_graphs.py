"""CUDA graphs on the command line: JSON, single fields, switches and levels."""

import msgspec
import pytest
from trimtab_engine.cli import _parser
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.graphs import CompilationConfig, CUDAGraphMode
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config
from trimtab_engine.runner.graphs.plan import NO_GRAPHS, graph_plan

SIZES = CompilationConfig(cudagraph_capture_sizes=(1, 2, 4))


def config(*flags: str) -> EngineConfig:
    return engine_config(_parser().parse_args(["serve", "/models/m", "--device", "cpu", *flags]))


def on_cuda(*flags: str) -> EngineConfig:
    return msgspec.structs.replace(config(*flags), device="cuda")


@pytest.mark.parametrize(
    "flags",
    [
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--cudagraph-capture-sizes=1,2,4"],
        ["--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4]}'],
        ["-cc", '{"cudagraph_capture_sizes": [1, 2, 4]}', "--cudagraph-capture-sizes=1,2,4"],
        ["-cc.cudagraph_capture_sizes=1,2,4"],
        ["--compilation-config.cudagraph-capture-sizes", "1", "2", "4"],
    ],
)
def test_sizes_accept_every_notation(flags: list[str]) -> None:
    assert config(*flags).compilation == SIZES


@pytest.mark.parametrize(
    "flags", [["-cc.cudagraph_mode=piecewise"], ["--compilation-config.cudagraph-mode", "PIECEWISE"]]
)
def test_single_fields_are_understood(flags: list[str]) -> None:
    assert config(*flags).compilation == CompilationConfig(cudagraph_mode=CUDAGraphMode.PIECEWISE)


@pytest.mark.parametrize("flags", [["-O1"], ["-O", "1"], ["--optimization-level", "1"], ["--optimization-level=1"]])
def test_level_accepts_every_notation(flags: list[str]) -> None:
    assert graph_plan(on_cuda(*flags)).mode is CUDAGraphMode.PIECEWISE


def test_cuda_default_is_full_decode_and_piecewise_graphs() -> None:
    plan = graph_plan(on_cuda("--max-num-seqs", "4"))
    assert plan.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert plan.piecewise == (1, 2, 4, 8)
    assert plan.full == ((1, (1, 2, 4)),)


@pytest.mark.parametrize("flags", [["-O3"], ["-cc.cudagraph_mode=piecewise"], ["--cudagraph-capture-sizes", "1"]])
def test_cpu_has_no_graphs_for_any_flag(flags: list[str]) -> None:
    assert graph_plan(config(*flags)) == NO_GRAPHS


def test_enforce_eager_disables_graphs_on_cuda() -> None:
    assert graph_plan(on_cuda("--enforce-eager")) == NO_GRAPHS


def test_graph_sizes_follow_caps_not_start_values() -> None:
    plan = graph_plan(on_cuda("--max-num-seqs", "2", "--max-num-seqs-cap", "8"))
    assert plan.full == ((1, (1, 2, 4, 8)),)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--cudagraph-capture-sizes=1,2", "-cc.cudagraph_capture_sizes=1"],
            r"--cudagraph-capture-sizes \[1, 2\] conflicts",
        ),
        (["--compilation-config", "{"], "is not JSON"),
        (["-cc.mode=2"], "torch.compile"),
        (["--max-cudagraph-capture-size", "70000"], "it must be 0 to 65536"),
    ],
)
def test_invalid_graph_flags_are_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)
