"""The vision model of the e2e scenario: built as in the pod, read by the engine, and accepted by validation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from crd_rules import cel_refusals, with_defaults
from harness.claims import MOUNT
from harness.deployment import sample
from harness.vision_model import DELIMITER_TOKENS, FOLDER, NUM_TOKENS, build_script, message, png, spec_changes
from trimtab_engine.models.checkpoint import check_tensors, check_vision_encoder
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.qwen2_5_vl_vision import parse_vision, vision_encoder_tensors
from trimtab_engine.models.registry import open_model, open_vision_encoder, parse_model_config
from trimtab_engine.multimodal.checkpoint import read_placeholders, read_processors
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.processor_cache import ProcessorCache
from trimtab_engine.multimodal.reader import MediaReader
from trimtab_engine.multimodal.sources import NOTHING_ELSE
from trimtab_engine.text.tokenizer import Tokenizer
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config
from trimtab_operator.planning.admission import validation_messages

PACKAGES = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("engine-image", "kernels", "modelspec"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the pod's script with a local folder instead of the claim."""
    claim = tmp_path_factory.mktemp("claim")
    script = build_script().replace(MOUNT, str(claim))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PYTHONPATH": PACKAGES, "PATH": path}
    subprocess.run(["sh", "-ec", script], check=True, timeout=240, env=environment)
    return claim / FOLDER


def test_engine_reads_model_and_vision_encoder(folder: Path) -> None:
    source = open_model(str(folder))
    config = parse_model_config(source.config, {}, "config.json")
    check_tensors(config, source)
    vision = parse_vision(ConfigReader(language_model_config(source.config), {}, "config.json"), config)
    check_vision_encoder(
        {name: tensor.shape for name, tensor in vision_encoder_tensors(vision).items()},
        open_vision_encoder(str(folder)),
    )
    facts = model_facts(str(folder))
    assert facts["supported"]
    assert facts["tower_bytes"] > 0


def test_image_has_expected_number_of_tokens(folder: Path) -> None:
    content = message("Which?", png(255, 0, 0))["content"]

    async def read() -> int:
        reader = MediaReader(read_processors(str(folder)), NOTHING_ELSE, ProcessorCache(0))
        try:
            item = await reader.item("image", content[0]["image_url"]["url"], "")
        finally:
            await reader.close()
        token_ids = Tokenizer(str(folder)).encode("<|vision_start|><|image_pad|><|vision_end|>Which?")
        return len(expand(token_ids, [item], read_placeholders(str(folder), ["image"]))[0])

    assert asyncio.run(read()) == NUM_TOKENS + DELIMITER_TOKENS + len(content[1]["text"])


def test_resource_is_valid() -> None:
    resource = with_defaults(sample("seeing", image="engine:1", **spec_changes("a-claim")))
    assert not validation_messages(resource, default_image=None)
    assert not cel_refusals(resource)
