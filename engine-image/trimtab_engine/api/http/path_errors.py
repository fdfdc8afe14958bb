"""Messages for unknown paths: the path is on the other port, misspelt, or requires another method."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherPort:
    """The server's other port: its name, its flag, and its path prefixes."""

    name: str
    flag: str
    begins: tuple[str, ...]

    def has(self, path: str) -> bool:
        return any(path == begin or path.startswith(f"{begin}/") for begin in self.begins)


PUBLIC_PORT = OtherPort(
    "public port",
    "--port",
    (
        "/v1", "/v2", "/score", "/rerank", "/livez", "/readyz", "/startupz", "/health", "/ping", "/version", "/metrics",
        "/load", "/tokenize", "/detokenize",
    ),
)  # fmt: skip
ADMIN_PORT = OtherPort(
    "admin port",
    "--admin-port",
    (
        "/admin", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/is_paused",
        "/is_sleeping", "/start_profile", "/stop_profile",
    ),
)  # fmt: skip


def unknown_path_message(path: str, paths: Iterable[str], other: OtherPort) -> str:
    """Return the message. `paths` are those of this port; a prefix such as / lists all paths below it."""
    if other.has(path):
        return f"{path} is on the server's {other.name} ({other.flag}), not on this port"
    known = [each for each in paths if "{" not in each]
    if below := [each for each in known if each.startswith(f"{path.rstrip('/')}/")]:
        return f"unknown path {path}; available: {', '.join(below)}"
    meant = [f"/v1{path}"] if f"/v1{path}" in known else difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    return f"unknown path {path}" + (f"; did you mean {meant[0]}?" if meant else "")


def unsupported_method_message(method: str, path: str, taken: Sequence[str]) -> str:
    """Return the message. `taken` are the path's methods; empty if only its pattern is known."""
    return f"{path} does not support {method}" + (f"; use {' or '.join(taken)}" if taken else "")
