"""Names of remote models. Pure, except for a check if a local folder of that name exists.

hf://ORG/NAME[@REVISION][/FILE.gguf], or ORG/NAME where no such folder is here
s3://BUCKET[/PREFIX][/FILE.gguf][@PIN]
oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]
"""

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.weights.open import HUB_NAME


class Scheme(StrEnum):
    """Kind of source: the Hugging Face hub, a bucket, an OCI registry."""

    HUB = "hf"
    S3 = "s3"
    OCI = "oci"


SCHEMES = tuple(f"{scheme}://" for scheme in Scheme)
PINS = {
    Scheme.HUB: re.compile(r"[0-9a-f]{40}"),
    Scheme.S3: re.compile(r"[0-9a-f]{64}"),
    Scheme.OCI: re.compile(r"sha256:[0-9a-f]{64}"),
}
"""An immutable pin: a commit, the digest of a set of objects, or of a manifest."""
NEWEST = {Scheme.HUB: "main", Scheme.S3: "objects", Scheme.OCI: "latest"}
"""Default revision; for a bucket, its current contents."""
FORMS = {
    Scheme.HUB: "hf://ORG/NAME or hf://ORG/NAME@REVISION",
    Scheme.S3: "s3://BUCKET/PREFIX",
    Scheme.OCI: "oci://REGISTRY/REPOSITORY:TAG or oci://REGISTRY/REPOSITORY@sha256:DIGEST",
}
WRITTEN = {
    Scheme.HUB: re.compile(
        r"(?P<place>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>refs/pr/\d+|[\w.-]+))?(?:/(?P<file>[\w.-]+\.gguf))?"
    ),
    Scheme.S3: re.compile(
        r"(?P<place>[A-Za-z0-9][\w.-]{1,62}(?:/[^/\x00-\x1f]+?)*?)(?:/(?P<file>[^/\x00-\x1f]+\.gguf))?/?"
        r"(?:@(?P<revision>[0-9a-f]{64}))?"
    ),
    Scheme.OCI: re.compile(
        r"(?P<place>(?:localhost|[\w-]+(?:\.[\w-]+)+|[\w.-]+(?=:\d)|\[[0-9a-f:]+\])(?::\d{1,5})?"
        r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+)"
        r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<revision>sha256:[0-9a-f]{64}))?(?P<file>)"
    ),
}


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that is elsewhere. `place` is ORG/NAME, BUCKET/PREFIX or REGISTRY/REPOSITORY; `revision` a branch, a tag
    or a pin, None the newest; `file` is the one GGUF file to take of several.
    """

    scheme: Scheme
    place: str
    revision: str | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """Default served model name."""
        return (self.file or self.place.rsplit("/", 1)[-1]).removesuffix(".gguf")

    @property
    def is_pinned(self) -> bool:
        """Return True if the revision is immutable."""
        return self.revision is not None and PINS[self.scheme].fullmatch(self.revision) is not None

    @property
    def asked(self) -> str:
        """The revision, also where none is written."""
        return self.revision or NEWEST[self.scheme]

    @property
    def cache_folder_name(self) -> str:
        """Return the model's folder name in the cache. Hub models use the hub's own name; bucket and registry names can
        have characters that are invalid in folder names, so a digest is added.
        """
        if self.scheme is Scheme.HUB:
            return "models--" + self.place.replace("/", "--")
        digest = hashlib.sha256(self.place.encode()).hexdigest()[:16]
        return f"{self.scheme}--{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)[:64]}--{digest}"

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        if self.revision is None:
            return f"{self.scheme}://{self.place}{file}"
        if self.scheme is Scheme.HUB:
            return f"{self.scheme}://{self.place}@{self.revision}{file}"
        return f"{self.scheme}://{self.place}{file}{'@' if self.is_pinned else ':'}{self.revision}"


def remote_model(model: str, revision: str | None = None) -> RemoteModel | None:
    """Return the remote model that `MODEL` and --revision name, or None for a local one.

    Raises:
        ModelError: a scheme without a name.
        ConfigError: two revisions, or a revision of a path.
    """
    for scheme in Scheme:
        if model.startswith(f"{scheme}://"):
            return _written(scheme, model, revision)
    if HUB_NAME.fullmatch(model) and not Path(model).exists():
        return RemoteModel(Scheme.HUB, model, revision)
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} belongs to a model that is fetched, and {model} is a path; leave it out"
        )
    return None


def _written(scheme: Scheme, model: str, revision: str | None) -> RemoteModel:
    found = WRITTEN[scheme].fullmatch(model.removeprefix(f"{scheme}://"))
    if found is None:
        raise ModelError(f"{model} names no model of {scheme}://; write {FORMS[scheme]}")
    parts = found.groupdict()
    written = parts["revision"] or parts.get("tag")
    if written and revision and written != revision:
        raise ConfigError(f"two revisions, {written} in {model} and --revision {revision}; give one")
    wanted = RemoteModel(scheme, parts["place"], written or revision, parts["file"] or None)
    if scheme is Scheme.S3 and wanted.revision is not None and not wanted.is_pinned:
        raise ConfigError(
            f"--revision {revision}: a bucket has no branches; leave it out, or give the pin that trimtab-engine "
            f"inspect {model} prints"
        )
    return wanted
