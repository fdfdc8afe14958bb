"""Families are plug-ins: one file each and one line in the registry; no other code knows an architecture by name. The
same holds for draft heads, which may build on the family of their layers.
"""

import ast
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trimtab_engine
from engine_benchmarks.parity import greedy_generator, load_runner
from trimtab_engine.errors import ModelError
from trimtab_engine.models import registry
from trimtab_engine.models.by_transformers.vision import TOWER
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.registry import BY_ARCHITECTURE, FAMILIES, GGUF_NAMES, parse_model_config
from trimtab_engine.speculative.loading import HEADS

PACKAGE = Path(trimtab_engine.__file__).parent
ARCHITECTURE = re.compile(r"\b[A-Z]\w*For(CausalLM|ConditionalGeneration)\b")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def family_files() -> set[Path]:
    """The files that the registry names."""
    lines = (PACKAGE / "models/registry.py").read_text().splitlines()
    names = [line.strip().removesuffix(".FAMILY,") for line in lines if line.endswith(".FAMILY,")]
    return {PACKAGE / "models" / f"{name}.py" for name in names}


def plug_in_files() -> set[Path]:
    """Architectures of families, heads, and vision encoders run by transformers."""
    heads = {Path(inspect.getfile(kind.parse)) for kind in HEADS.values()}
    return family_files() | heads | {Path(inspect.getfile(TOWER.parse))}


def imported(file: Path) -> Iterator[str]:
    """Modules that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_architecture_is_named_outside_its_plug_ins_file() -> None:
    named = {
        f"{file.relative_to(PACKAGE)} names {match[0]}"
        for file in PACKAGE.rglob("*.py")
        if file not in plug_in_files()
        for match in ARCHITECTURE.finditer(file.read_text())
    }
    assert named == set()


def test_only_the_registry_imports_families() -> None:
    modules = {f"trimtab_engine.models.{file.stem}" for file in family_files()}
    importing = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file not in plug_in_files() and modules & set(imported(file))
    }
    assert importing == {"models/registry.py"}


def test_every_family_has_a_file_of_its_own() -> None:
    assert len(family_files()) == len(FAMILIES)
    assert all(file.exists() for file in family_files())


def test_no_two_families_claim_one_name() -> None:
    assert len(BY_ARCHITECTURE) == sum(len(family.architectures) for family in FAMILIES)
    assert len(GGUF_NAMES) == sum(len(family.gguf_names) for family in FAMILIES)
    assert all(names.architecture in BY_ARCHITECTURE for names in GGUF_NAMES.values())


def test_a_family_that_is_added_is_read_counted_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the registry's entry is added: configuration, facts and tokens are those of the decoder that it builds."""

    def tokens(architecture: str) -> list[list[int]]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]}))
        runner = load_runner(str(tmp_path), num_blocks=8, load_format="dummy")
        return greedy_generator(runner, block_size=16)([[5, 6, 7]], 8)

    known = tokens("LlamaForCausalLM")
    with pytest.raises(ModelError, match="architecture OursForCausalLM is not supported: transformers"):
        tokens("OursForCausalLM")
    family = replace(BY_ARCHITECTURE["LlamaForCausalLM"], architectures=("OursForCausalLM",), gguf_names={})
    monkeypatch.setitem(registry.BY_ARCHITECTURE, "OursForCausalLM", family)
    assert tokens("OursForCausalLM") == known
    assert model_facts(str(tmp_path), load_format="dummy")["supported"] is True


def test_a_configuration_that_names_no_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match="no architectures; expected one of LlamaForCausalLM"):
        parse_model_config({}, {}, "config.json")


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("rms_norm_eps", math.nan, "a number"),
        ("rope_theta", math.inf, "a number"),
        ("rope_theta", 0, "a number above 0"),
        ("eos_token_id", "2", "whole numbers of 0 or more"),
        ("eos_token_id", [2, -1], "whole numbers of 0 or more"),
        ("eos_token_id", 2.5, "whole numbers of 0 or more"),
    ],
)
def test_numbers_that_are_none_are_told_by_file_key_and_value(key: str, value: Any, needed: str) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: {key} is .*; {needed} (is|are) needed$"):
        parse_model_config(CONFIG | {key: value}, {}, "config.json")


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_rope_is_scaled_by_a_number_above_0(value: float) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: factor is .* is needed$"):
        parse_model_config(CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": value}}, {}, "config.json")


@pytest.mark.parametrize(
    ("scaling", "max_model_len"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1 << 40}, 1 << 31),
        ({"rope_type": "yarn", "factor": 4.0}, 64),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_yarn_added_to_a_config_extends_positions(scaling: dict[str, Any], max_model_len: int) -> None:
    """Model cards add rope_scaling and leave max_position_embeddings as it was; vLLM serves original x factor."""
    for key in ("rope_scaling", "rope_parameters"):
        config = parse_model_config(CONFIG | {key: scaling}, {}, "config.json")
        assert config.max_model_len == max_model_len
