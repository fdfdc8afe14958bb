"""gpu.json, written after every row so that an interrupted run keeps its results.

The processes of one run (`run`, see __main__.py) write it one after the other. It also contains the row being measured,
with a time limit, so that a supervisor knows which row ended its process or hangs. Does not import torch.
"""

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
FILE = "gpu.json"
PATH = re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)")


def format_error(error: BaseException, length: int = 300) -> str:
    """Return the error on one line, without the machine's folders."""
    return f"{type(error).__name__}: {PATH.sub(_last_part, ' '.join(str(error).split()))}"[:length]


def _last_part(path: re.Match[str]) -> str:
    return path.group(1)


class Report:
    """The file and its rows by name: limit, bar, and rate, share, seconds, peers or error."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.path, self.run = path, run
        found = json.loads(path.read_text()) if path.exists() else {}
        self.identity: Entry = found.get("identity", {})
        self.command: str = found.get("command", "")
        self.limits: dict[str, float] = found.get("limits", {})
        self.limits_at_end: dict[str, float] = found.get("limits_at_end", {})
        self.rows: dict[str, Entry] = found.get("rows", {})
        self.running: Entry | None = found.get("running")

    def start(self, identity: Entry, command: str, *, keep_rows: bool, only: str) -> None:
        """Start a run: remove rows of other devices or versions, and rows to be measured again."""
        if identity != self.identity:
            self.rows = {}
        if not keep_rows:
            self.rows = {name: row for name, row in self.rows.items() if only not in name}
        self.identity, self.command, self.running, self.limits_at_end = identity, command, None, {}
        self.write()

    def has(self, name: str) -> bool:
        """Return True if the row was measured; a failed one is retried in another run. It may already have peers."""
        row = self.rows.get(name, {})
        return "run" in row and ("error" not in row or row["run"] == self.run)

    def has_peer(self, name: str, peer: str) -> bool:
        """Return True if a peer of the row was measured."""
        found = self.rows.get(name, {}).get("peers", {}).get(peer)
        return found is not None and ("not_run" not in found or found.get("run") == self.run)

    def begin(self, name: str, peer: str = "", *, seconds: float) -> None:
        """Record the row being measured and its time limit, after which it counts as hung."""
        self.running = {"row": name, "peer": peer, "until": time.time() + seconds}
        self.write()

    def add(self, name: str, entry: Entry) -> None:
        """Store a row, and write the file."""
        peers = self.rows.get(name, {}).get("peers", {})
        date = datetime.now(UTC).date().isoformat()
        self.rows[name] = {"peers": peers, **entry, "date": date, "run": self.run}
        self.running = None
        self.write()

    def add_peer(self, name: str, peer: str, entry: Entry) -> None:
        """Store a peer's result for a row."""
        self.rows.setdefault(name, {}).setdefault("peers", {})[peer] = {**entry, "run": self.run}
        self.running = None
        self.write()

    def fail_running(self, why: str) -> bool:
        """Record a failure of the row being measured; return False if there is none."""
        if self.running is None:
            return False
        name, peer = self.running["row"], self.running["peer"]
        if peer:
            self.add_peer(name, peer, {"not_run": why})
        else:
            self.add(name, {"error": why})
        return True

    def drop_running(self) -> None:
        """Remove the row being measured, which was not reached in time."""
        self.running = None
        self.write()

    def write(self) -> None:
        """Replace the file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        content = {
            "identity": self.identity,
            "command": self.command,
            "limits": self.limits,
            "limits_at_end": self.limits_at_end,
            "rows": self.rows,
        }
        temporary.write_text(json.dumps(content | ({"running": self.running} if self.running else {}), indent=1) + "\n")
        temporary.replace(self.path)
