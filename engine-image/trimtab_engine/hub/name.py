"""How a model of the hub is written: hf://ORG/NAME[@REVISION][/FILE.gguf], or ORG/NAME where no such folder is here."""

import re
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.weights.open import HUB_NAME

SCHEME = "hf://"
WRITTEN = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>refs/pr/\d+|[\w.-]+))?(?:/(?P<file>[\w.-]+\.gguf))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub. `revision` is a branch, a tag or a commit, None the main branch; `file` is the one GGUF file
    to take of several."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """What clients call it where no other name is given."""
        return (self.file or self.repo.rsplit("/", 1)[-1]).removesuffix(".gguf")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision can never mean anything else: it is a commit."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


def hub_model(model: str, revision: str | None = None) -> HubModel | None:
    """What `MODEL` and --revision name on the hub; None for what is on this machine. Raises ModelError for hf:// and no
    name behind it, ConfigError for two revisions."""
    if model.startswith(SCHEME):
        found = WRITTEN.fullmatch(model.removeprefix(SCHEME))
        if found is None:
            raise ModelError(f"{model} names no model of the hub; write hf://ORG/NAME or hf://ORG/NAME@REVISION")
        written = found["revision"]
        if written and revision and written != revision:
            raise ConfigError(f"two revisions, {written} in {model} and --revision {revision}; give one")
        return HubModel(found["repo"], written or revision, found["file"])
    if HUB_NAME.fullmatch(model) and not Path(model).exists():
        return HubModel(model, revision)
    if revision is not None:
        raise ConfigError(f"--revision {revision} belongs to a model of the hub, and {model} is a path; leave it out")
    return None
