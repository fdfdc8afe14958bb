"""Allowed sources of images and videos are set only by flags at startup."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from trimtab_engine.cli import _parser
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config
from trimtab_engine.flags.media import media_sources
from trimtab_engine.flags.parser import OneLineParser
from trimtab_engine.flags.serve import add_serve_flags
from trimtab_engine.multimodal.sources import NOTHING_ELSE, AllowedHost


def arguments(*flags: str) -> argparse.Namespace:
    parser = OneLineParser(prog="serve")
    add_serve_flags(parser)
    return parser.parse_args(["model", *flags])


def test_default_allows_no_files_or_urls() -> None:
    assert media_sources(arguments()) == NOTHING_ELSE


def test_listed_folder_and_hosts_are_allowed(tmp_path: Path) -> None:
    hosts = ("--allowed-media-domains", "images.example.com", "10.0.0.5:9000")
    allowed = media_sources(arguments("--allowed-local-media-path", str(tmp_path), *hosts))
    assert allowed.local_path == str(tmp_path)
    assert allowed.hosts == (AllowedHost("images.example.com"), AllowedHost("10.0.0.5", 9000))


def test_invalid_folder_or_host_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-local-media-path .* is not a folder"):
        media_sources(arguments("--allowed-local-media-path", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"--allowed-media-domains: '\*' is not a host"):
        media_sources(arguments("--allowed-media-domains", "*"))


@pytest.mark.parametrize("size", ["-1", "x", "nan", "1e9"])
def test_invalid_media_cache_size_is_rejected(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(f"--mm-processor-cache-gb={size}")
    assert "is not a number of GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("architecture", "on_cuda"),
    [
        ("Qwen2_5_VLForConditionalGeneration", True),
        ("LlavaForConditionalGeneration", False),  # the vision encoder would run in transformers: language model only
        ("LlamaForCausalLM", False),
    ],
)
def test_media_default_depends_on_device_support(
    architecture: str, on_cuda: bool, model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(model_of(architectures=[architecture]))
    monkeypatch.setattr("trimtab_engine.flags.engine._device", lambda asked: ("cuda", 80 << 30))
    config = engine_config(_parser().parse_args(["serve", model, "--block-size", "16"]))
    assert config.limit_mm_per_prompt == ({"image": 999, "video": 999} if on_cuda else {})
