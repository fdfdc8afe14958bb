"""Unpacks the layers of an image into the cache, under the digest of each file, like all other files.

Only files that models are loaded from are written; files that a later layer deletes or replaces are left out.
"""

import hashlib
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import IO, BinaryIO

from trimtab_engine.errors import ModelError
from trimtab_engine.sources.cache import SPARE_BYTES, ModelCache
from trimtab_engine.sources.files import MAX_TEXT_BYTES, TEXT_SUFFIXES, Listing, RemoteFile
from trimtab_engine.sources.oci_manifest import in_its_folder, is_wanted, plain_name
from trimtab_engine.sources.progress import format_bytes
from trimtab_engine.sources.source import PackedSource

COPY_BYTES = 1 << 20
LEAP_BYTES = 64 << 10  # read at once of a layer in which one leaps from header to header
STREAM_BYTES = 8 << 20  # and of one that has to be read through
DELETED, ALL_DELETED = ".wh.", ".wh..wh..opq"  # prefix of whiteout files, which delete a file of a lower layer

Keep = Callable[[str, int, IO[bytes]], str]
"""Handler of a file in an archive, given name, size and bytes; returns its digest, or None if it was skipped."""


def with_unpacked(model_cache: ModelCache, listing: Listing) -> tuple[Listing, tuple[RemoteFile, ...]]:
    """Return the listing with the files of the archives, unpacked, and all blobs written: including those that a later
    layer replaced or deleted.

    Raises:
        ModelError: an archive is invalid or does not fit.
    """
    written: list[RemoteFile] = []

    def keep(name: str, size: int, stream: IO[bytes]) -> str:
        free = shutil.disk_usage(model_cache.folder).free - SPARE_BYTES
        if size > free:
            raise ModelError(
                f"{listing.model}: {name} of {format_bytes(size)} does not fit; use a larger volume, or "
                f"another folder with --download-dir"
            )
        written.append(RemoteFile(name, size, _as_blob(model_cache, stream)))
        return written[-1].digest

    def layer(archive: RemoteFile) -> BinaryIO:
        return model_cache.blob(archive).open("rb")

    return _unpacked(listing, layer, keep, is_stream=False), tuple(written)


def with_described(model_cache: ModelCache, listing: Listing, source: PackedSource, texts: Collection[str]) -> Listing:
    """The same without fetching the archives: of their files only `texts` are kept. In a plain archive one leaps from
    header to header; a compressed one has to be read through.
    """

    def keep(name: str, size: int, stream: IO[bytes]) -> str:
        return _as_blob(model_cache, stream) if posixpath.basename(name) in texts else ""

    def layer(archive: RemoteFile) -> BinaryIO:
        return source.reader(listing, archive, STREAM_BYTES if archive.form == "gz" else LEAP_BYTES)

    return _unpacked(listing, layer, keep, is_stream=True)


def _unpacked(listing: Listing, layer: Callable[[RemoteFile], BinaryIO], keep: Keep, *, is_stream: bool) -> Listing:
    found: dict[str, RemoteFile] = {}
    for archive in listing.archives:
        with layer(archive) as stream:
            mode = f"r|{archive.form}" if is_stream and archive.form else f"r:{archive.form}"
            _apply_layer(found, _members(listing, archive, stream, mode, keep))
    return replace(listing, files=in_its_folder(listing.model, (*listing.files, *found.values())), archives=())


def _as_blob(model_cache: ModelCache, stream: IO[bytes]) -> str:
    """Keep the bytes, in the one process that fetches; their digest."""
    unfinished = model_cache.folder / "blobs" / "unpacking.incomplete"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    hashed = hashlib.sha256()
    with unfinished.open("wb") as out:
        while data := stream.read(COPY_BYTES):
            hashed.update(data)
            out.write(data)
    unfinished.replace(unfinished.with_name(hashed.hexdigest()))
    return hashed.hexdigest()


def _apply_layer(found: dict[str, RemoteFile], members: Iterator[RemoteFile]) -> None:
    """Lay a layer over the lower ones."""
    own: set[str] = set()
    for file in members:
        folder, name = posixpath.split(file.name)
        begin = f"{folder}/" if folder else ""
        if name == ALL_DELETED:
            for lower in [path for path in found if path.startswith(begin) and path not in own]:
                del found[lower]
        elif name.startswith(DELETED):
            gone = begin + name.removeprefix(DELETED)
            for lower in [path for path in found if path == gone or path.startswith(f"{gone}/")]:
                del found[lower]
        else:
            own.add(file.name)
            found[file.name] = file


def _members(listing: Listing, archive: RemoteFile, layer: BinaryIO, mode: str, keep: Keep) -> Iterator[RemoteFile]:
    """The files of one layer, with a digest where they were kept."""
    seen: dict[str, RemoteFile] = {}
    try:
        with tarfile.open(fileobj=layer, mode=mode) as tar:  # type: ignore[call-overload]  # one of four modes
            for member in tar:
                name = plain_name(member.name)
                if name is None or not (member.isfile() or member.islnk()):
                    continue
                if member.islnk():
                    same = seen.get(plain_name(member.linkname) or "")
                    digest = "" if same is None else same.digest
                    size = 0 if same is None else same.size
                else:
                    size, digest = member.size, _kept(tar, member, name, keep)
                seen[name] = RemoteFile(name, size, digest)
                yield seen[name]
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ModelError(
            f"{listing.model}: {archive.name} is no archive that could be unpacked ({error}); push it again"
        ) from None


def _kept(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, keep: Keep) -> str:
    """Return the digest of a stored file, or None for a file that models do not need."""
    if not is_wanted(name) or (name.endswith(TEXT_SUFFIXES) and member.size > MAX_TEXT_BYTES):
        return ""
    stream = tar.extractfile(member)
    return "" if stream is None else keep(name, member.size, stream)
