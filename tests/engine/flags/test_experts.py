"""--enable-eplb and --eplb-config: JSON, single fields, and rejected combinations."""

import argparse
from typing import Any

import pytest
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.experts import add_eplb_flags, eplb_fields


def read(*flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_eplb_flags(parser)
    return eplb_fields(parser.parse_args(list(flags)))["eplb"]


def test_eplb_is_off_by_default() -> None:
    assert read() is None
    assert read("--enable-eplb") == EplbConfig()


def test_json_and_single_fields_go_together() -> None:
    read_config = read(
        "--enable-eplb", "--eplb-config", '{"step_interval": 50}', "--eplb-config.num-redundant-experts", "2",
        "--eplb-config.log_balancedness", "true",
    )  # fmt: skip
    assert read_config == EplbConfig(step_interval=50, num_redundant_experts=2, log_balancedness=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--eplb-config", '{"step_interval": 50}'), "add --enable-eplb"),
        (("--enable-eplb", "--eplb-config", "fast"), "is not JSON"),
        (("--enable-eplb", "--eplb-config", "[]"), "must be a JSON object"),
        (
            ("--enable-eplb", "--eplb-config", '{"step_interval": 1}', "--eplb-config.step_interval", "2"),
            "set only one",
        ),
    ],
)
def test_conflicting_eplb_flags_are_rejected(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*flags)
