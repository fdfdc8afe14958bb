"""Files and batches as they are stored, and their form in OpenAI's API. Times are seconds since the epoch."""

from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

Json = dict[str, Any]


class FileRecord(msgspec.Struct, kw_only=True):
    """A stored file. `owner` is the API key's salt: a key sees only its own files."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_json(self) -> Json:
        shown = {name: getattr(self, name) for name in ("id", "bytes", "created_at", "filename", "purpose")}
        return {"object": "file", "status": "processed", "status_details": None, "expires_at": self.expires_at, **shown}


class LineError(msgspec.Struct, kw_only=True):
    """An invalid line of an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, kw_only=True):
    """A batch, written at every change of its status."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    result_life: int
    """Seconds until the output and error files expire."""
    times: dict[str, int] = {}
    """Time at which each status was reached."""

    def result_id(self, kind: Literal["o", "e"]) -> str:
        """Return the ID of the output or error file, the same after each restart."""
        return f"file-{self.id.rpartition('_')[2]}{kind}"

    def to_json(self) -> Json:
        """Return OpenAI's batch object."""
        errors = {"object": "list", "data": [msgspec.structs.asdict(error) for error in self.errors]}
        shown = (
            "id", "endpoint", "input_file_id", "completion_window", "created_at", "expires_at", "metadata", "status",
            "output_file_id", "error_file_id",
        )  # fmt: skip
        at = {
            f"{status}_at": self.times.get(status)
            for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        }
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {
            "object": "batch",
            **{name: getattr(self, name) for name in shown},
            "errors": errors if self.errors else None,
            "request_counts": counts,
            **at,
        }
