"""Parsing of OCI manifests: layers that are model files, and layers that are archives of such files. Pure.

A layer is a file if it has a name (ORAS: org.opencontainers.image.title; ModelPack: …model.filepath) and is not an
archive; layers of images, ModelKits and ModelPacks are tar archives, in which files of later layers win.
"""

import json
import platform
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_engine.errors import ModelError
from trimtab_engine.model_files.json_files import CONFIG_FILE
from trimtab_engine.sources.files import LOADED_SUFFIXES, RemoteFile
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.weights.open import PICKLE_SUFFIXES

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPTED = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))
PATHS = ("org.cncf.model.filepath", "org.cnai.model.filepath")
TITLE = "org.opencontainers.image.title"
IS_FOLDER = "io.deis.oras.content.unpack"  # ORAS packed a folder, under the title of that folder
NO_MODEL = re.compile(r"\.(?:dataset|code|docs?|license|prompt|bundle)(?:\.|$)")
"""Media type parts of ModelKit and ModelPack layers other than the model."""
ARCHIVE = re.compile(r"[.+]tar(?:[.+](?P<packed>gzip|zstd))?$")
DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
MACHINES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64"}
MAX_LAYERS = 10_000


def chosen_manifest(model: RemoteModel, index: Mapping[str, Any]) -> str:
    """The digest of the manifest that is meant of an index's: its only one, or that for this machine. A model is the
    same for all, so where none is for this machine the first will do.
    """
    entries = [entry for entry in _objects(index.get("manifests")) if entry.get("mediaType") in MANIFEST_TYPES]
    platforms = [entry.get("platform") or {} for entry in entries]
    images = [(entry, at) for entry, at in zip(entries, platforms, strict=True) if at.get("os") != "unknown"]
    machine = MACHINES.get(platform.machine(), platform.machine())
    for entry, _ in sorted(images, key=lambda one: one[1].get("architecture") != machine):
        return _digest(model, entry)
    raise ModelError(f"{model}: is an index that names no image; name another tag, or the digest of a manifest")


def layers_of(model: RemoteModel, manifest: Mapping[str, Any]) -> tuple[tuple[RemoteFile, ...], tuple[RemoteFile, ...]]:
    """Return the layers that are files, and those that are archives, lower layers first.

    Raises:
        ModelError: there are neither; the message has the types found.
    """
    files: list[RemoteFile] = []
    archives: list[RemoteFile] = []
    others: list[str] = []
    for layer in _objects(manifest.get("layers"))[:MAX_LAYERS]:
        kind, annotations = str(layer.get("mediaType")), layer.get("annotations") or {}
        hexes, size = _digest(model, layer).removeprefix("sha256:"), _size(model, layer)
        archive = ARCHIVE.search(kind)
        name = _name(annotations, kind)
        is_file = name is not None and (archive is None or _is_generic_type(annotations))
        if NO_MODEL.search(kind):
            continue
        if is_file and name is not None:
            files.append(RemoteFile(name, size, hexes))
        elif archive is not None and archive["packed"] == "zstd":
            raise ModelError(
                f"{model}: has a layer of the type {kind}; zstd is not supported: pack it as plain tar, which "
                f"weights gain "
                f"nothing over, or with gzip"
            )
        elif archive is not None:
            archives.append(
                RemoteFile(f"layer {len(archives) + 1}", size, hexes, form="gz" if archive["packed"] else "")
            )
        else:
            others.append(kind)
    if not files and not archives:
        found = ", ".join(sorted(set(others))) or "no layers"
        raise ModelError(
            f"{model}: holds nothing that is known as files of a model ({found}); push its folder with oras push, or "
            f"build an image that copies it"
        )
    return tuple(files), tuple(archives)


def in_its_folder(model: RemoteModel, files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """The files under their names in the model's own folder: the highest one that holds weights. Raises ModelError
    where several are equally high.
    """
    for wanted in ((".safetensors", ".gguf"), PICKLE_SUFFIXES, (CONFIG_FILE,)):
        folders = {posixpath.dirname(file.name) for file in files if file.name.endswith(wanted)}
        if folders:
            break
    else:
        return tuple(files)
    height = min(_depth(folder) for folder in folders)
    highest = sorted(folder for folder in folders if _depth(folder) == height)
    if len(highest) > 1:
        raise ModelError(f"{model}: holds several models ({', '.join(highest)}); push each by itself")
    begin = f"{highest[0]}/" if highest[0] else ""
    return tuple(_renamed(file, file.name.removeprefix(begin)) for file in files if file.name.startswith(begin))


def plain_name(written: str) -> str | None:
    """A path within a model; None for one that would lead out of it."""
    parts = [part for part in written.split("/") if part not in ("", ".")]
    return None if not parts or ".." in parts or "\x00" in written else "/".join(parts)


def is_wanted(name: str) -> bool:
    """Return True if a file of an archive should be unpacked."""
    return name.endswith(LOADED_SUFFIXES)


def parsed(model: RemoteModel, text: bytes) -> Mapping[str, Any]:
    """Return the parsed manifest.

    Raises:
        ModelError: it is not a manifest.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("schemaVersion") != 2:
        raise ModelError(f"{model}: the registry's manifest is not of schema version 2; push it with a newer tool")
    return found


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _renamed(file: RemoteFile, name: str) -> RemoteFile:
    return RemoteFile(name, file.size, file.digest)


def _name(annotations: Mapping[str, Any], kind: str) -> str | None:
    for key in (*PATHS, TITLE):
        if isinstance(annotations.get(key), str):
            return plain_name(annotations[key])
    if "gguf" in kind:  # Docker's models, which had no names at first
        return "model.gguf"
    return None


def _is_generic_type(annotations: Mapping[str, Any]) -> bool:
    """Return True if the media type is generic: ORAS uses an image layer's type for every file, and marks its
    archives.
    """
    has_path = any(key in annotations for key in PATHS)
    return not has_path and TITLE in annotations and annotations.get(IS_FOLDER) != "true"


def _objects(found: object) -> list[Mapping[str, Any]]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _digest(model: RemoteModel, described: Mapping[str, Any]) -> str:
    digest = str(described.get("digest"))
    if DIGEST.fullmatch(digest) is None:
        raise ModelError(f"{model}: the manifest names something by {digest[:80]}, and only sha256 is built")
    return digest


def _size(model: RemoteModel, described: Mapping[str, Any]) -> int:
    size = described.get("size")
    if not isinstance(size, int) or size < 0:
        raise ModelError(f"{model}: the manifest has no size for {described.get('digest')}; push it again")
    return size
