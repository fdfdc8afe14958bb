"""Messages about the state stream between API servers and engine cores (docs/reference/contract.md section 8)."""

import msgspec
from trimtab_router.protocol.messages import Coefficients, Load


class PrefixCuts(msgspec.Struct, array_like=True, frozen=True):
    """Prefix keys of a prompt, and how many of its tokens each covers."""

    keys: list[int]
    ends: list[int]
    """Never decreasing; as long as `keys`."""
    num_bytes: int = 0
    """Canonical bytes of the whole prompt; 0 for token IDs, which show nothing of the length of texts."""


class Dispatch(msgspec.Struct, array_like=True, frozen=True):
    """Number under which a router sent a request (header x-trimtab-dispatch)."""

    router: str
    number: int


class ReportState(msgspec.Struct, tag="report_state"):
    """Report keys, load and dispatches with every step from now on, or stop. From client 0, which has the routers."""

    enabled: bool


class NoteDispatch(msgspec.Struct, tag="note_dispatch"):
    """A dispatch that ended without reaching a core: it was rejected by the API server."""

    dispatch: Dispatch


class CoreReport(msgspec.Struct, array_like=True):
    """State of one core after a step."""

    load: Load
    added: list[int] = []
    """Prefix keys whose blocks are cached since the last report."""
    removed: list[int] = []
    """Prefix keys whose blocks are no longer cached."""
    dispatches: list[Dispatch] = []
    """Dispatches that arrived since the last report; the load includes them."""
    coefficients: Coefficients | None = None
    """None if unchanged."""
