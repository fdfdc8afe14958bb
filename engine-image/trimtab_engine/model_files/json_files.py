"""JSON files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_engine.errors import ModelError

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small text files that a clone without Git LFS has instead of large ones."""


def read_json(path: Path, *, required: bool = True) -> Mapping[str, Any]:
    """Return the JSON object in a file; an empty one if the file is absent and not required.

    Raises:
        ModelError: The file is absent, damaged, or a Git LFS pointer.
    """
    try:
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise ModelError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` in {path.parent}")
        value = json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ModelError(f"model {path.parent}: no {path.name} in it") from None
        return {}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value
