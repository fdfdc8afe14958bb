"""Why there is nothing at a path: the server's other port has it, it is spelt otherwise, or takes another method."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherPort:
    """The port that a path may have been meant for: how it is called, its flag, and what its paths begin with."""

    name: str
    flag: str
    begins: tuple[str, ...]

    def has(self, path: str) -> bool:
        return any(path == begin or path.startswith(f"{begin}/") for begin in self.begins)


PUBLIC_PORT = OtherPort(
    "public port",
    "--port",
    (
        "/v1", "/livez", "/readyz", "/startupz", "/health", "/ping", "/version", "/metrics", "/load", "/tokenize",
        "/detokenize",
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


def why_no_path(path: str, paths: Iterable[str], other: OtherPort) -> str:
    """`paths` are those of this port. Who asks for the beginning of some, such as /, is told all of these."""
    if other.has(path):
        return f"{path} is on the server's {other.name}, that of its {other.flag}, and not on this one"
    known = [each for each in paths if "{" not in each]
    if below := [each for each in known if each.startswith(f"{path.rstrip('/')}/")]:
        return f"there is no {path} here; there are {', '.join(below)}"
    meant = [f"/v1{path}"] if f"/v1{path}" in known else difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    return f"there is no {path} here" + (f"; did you mean {meant[0]}?" if meant else "")


def why_no_method(method: str, path: str, taken: Sequence[str]) -> str:
    """`taken` are the methods of the path; none: it is known by its pattern alone."""
    return f"{path} is not there for {method}" + (f"; it takes {' or '.join(taken)}" if taken else "")
