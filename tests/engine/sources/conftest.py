"""A fake hub on loopback that this process may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hub_server import HubServer
from hub_repository import REPO, a_repository
from huggingface_hub import close_session, constants

LARGE_BYTES = 4096


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The fake hub; all other environment settings are removed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    server = HubServer({REPO: a_repository(tmp_path / "hub" / REPO)}, large_bytes=LARGE_BYTES)
    with server.running():
        yield server
    close_session()
