"""Uploads of files, which are larger than other bodies, are not JSON, and go to the disk while they are received."""

from collections.abc import Mapping
from typing import Any

UPLOADS = "/v1/files"
MAX_FILE_BYTES = 200 << 20  # OpenAI's limit for input files of batches
FORM = b"multipart/form-data"


def is_upload(scope: Mapping[str, Any]) -> bool:
    """Return True if the body of a request is a file's."""
    if scope["path"] != UPLOADS:
        return False
    kind: bytes = dict(scope["headers"]).get(b"content-type", b"")
    return kind.lower().startswith(FORM)
