"""The command line of the router."""

from __future__ import annotations

import re

import pytest
from trimtab_router.config import RouterConfig
from trimtab_router.flags import ConfigError, build_parser, parse_arguments

DIGEST = "ab" * 32


def test_defaults_are_those_of_the_settings() -> None:
    parsed = parse_arguments(["--service=models/chat-engines"])
    assert parsed == RouterConfig(service="models/chat-engines", admin_host="127.0.0.1")


def test_flags_that_the_operator_renders_are_accepted() -> None:
    parsed = parse_arguments(
        "--service=ns/name-engines --served-model=a --served-model=b --max-hold=600 --drain-timeout=630 --port=8000 "
        f"--admin-port=8002 --priority=high=10 --priority=low=-5 --admin-token-sha256={DIGEST} --trust-headers "
        "--max-held-requests=5 --itl-target=0.05 --priority-header=x-p --tenant-header=x-t --session-header=x-s".split()
    )
    assert parsed.served_models == ("a", "b")
    assert (parsed.max_hold_seconds, parsed.drain_timeout_seconds, parsed.itl_target_seconds) == (600.0, 630.0, 0.05)
    assert (parsed.band("high"), parsed.band("low"), parsed.band("other"), parsed.band(None)) == (-10, 5, 0, 0)
    assert parsed.admin_host == "0.0.0.0"
    assert parsed.trust_headers


def test_default_priority_applies_to_other_requests() -> None:
    parsed = parse_arguments(["--service=a/b", "--priority=default=3", f"--key-priority={DIGEST}=default"])
    assert parsed.band("unknown") == -3
    assert parsed.key_priorities == {DIGEST: "default"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("1.5", 1.5), ("250ms", 0.25), ("30s", 30.0), ("10m", 600.0), ("1h", 3600.0)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_arguments(["--service=a/b", f"--max-hold={text}"]).max_hold_seconds == seconds


def test_endpoints_are_parsed() -> None:
    parsed = parse_arguments(["--endpoint=http://10.0.0.1:8000?admin=8001", "--endpoint=http://[::1]:9"])
    first, second = parsed.endpoints
    assert (first.name, first.host, first.port, first.admin_port) == ("10.0.0.1:8000", "10.0.0.1", 8000, 8001)
    assert (second.name, second.host, second.port, second.admin_port) == ("[::1]:9", "::1", 9, None)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--service=a/b --endpoint=http://h:1",
        "--service=noslash",
        "--service=a/B",
        "--endpoint=h:1",
        "--endpoint=https://h:1",
        "--endpoint=http://h:1/v1",
        "--endpoint=http://h:1?other=2",
        "--endpoint=http://h:1?admin=0",
        "--endpoint=http://h:1 --endpoint=http://h:1",
        "--service=a/b --max-hold=soon",
        "--service=a/b --max-hold=-1",
        "--service=a/b --max-body-bytes=0",
        "--service=a/b --max-held-requests=0",
        "--service=a/b --processes=0",
        "--service=a/b --priority=high",
        "--service=a/b --priority=high=first",
        f"--service=a/b --key-priority={DIGEST}=high",
        "--service=a/b --priority=high=1 --key-priority=short=high",
        "--service=a/b --admin-token-sha256=secret",
        "--service=a/b --port=70000",
        "--service=a/b --serv=a",
    ],
)
def test_wrong_flags_are_rejected_in_one_line(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(flags.split())
    assert "\n" not in str(caught.value)


def test_help_names_every_flag() -> None:
    text = build_parser().format_help()
    assert {"--service", "--max-hold", "--processes"} <= set(re.findall(r"--[\w-]+", text))
