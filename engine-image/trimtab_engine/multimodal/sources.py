"""Parsing and permission check of media URLs. Pure: opens, resolves and requests nothing.

URLs are client input, fetched from inside the network (SSRF): only the canonical spelling of an address is accepted,
all others are rejected. The resolved addresses are checked later (fetching.py).
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from trimtab_engine.errors import ConfigError, InvalidRequest

MAX_URL_CHARACTERS = 8192  # limit for all but data: URLs, which are as long as their content
MAX_SHOWN_CHARACTERS = 80
PORTS = {"http": 80, "https": 443}
PLAIN = re.compile(r"[!-\[\]-~]+")  # printable ASCII without blanks and without the backslash
REMOTE = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label with which resolvers take the whole for an IPv4 address
INLINE = re.compile(r"data:([a-z0-9.+-]+/[a-z0-9.+-]+)((?:;[a-z0-9=.+-]+)*);base64,", re.IGNORECASE)
REMEDY = "send its content as data:image/png;base64,…"


@dataclass(frozen=True, slots=True)
class Inline:
    """A data: URL: its declared type in lower case, and its content in base64."""

    mime: str
    base64: str


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on the server, which must be below the allowed folder: checked when it is opened."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of an allowed host."""

    scheme: Literal["http", "https"]
    host: str
    """A name in lower case without a last dot, or an address in its canonical form, IPv6 without brackets."""
    port: int
    target: str
    """Path and query as they are sent."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


Source = Inline | LocalFile | RemoteFile


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """An allowed host. `port`: None for the scheme's default."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> "AllowedHost":
        """Read HOST or HOST:PORT of the command line. Raises ConfigError."""
        match = AUTHORITY.fullmatch(text)
        host = _host(match.group(1)) if match else None
        port = int(match.group(2)) if match and match.group(2) else None
        if host is None or (port is not None and not 0 < port < 65536):
            raise ConfigError(
                f"--allowed-media-domains: {_format_authority(text)} is not a host; write whole names such as "
                f"images.example.com, or "
                f"images.example.com:8443 (there are no wildcards)"
            )
        return cls(host, port)


@dataclass(frozen=True, slots=True)
class AllowedSources:
    """Media that may be read in addition to request bodies: files below a folder, and responses of some hosts. Nothing
    by default.
    """

    local_path: str | None = None
    hosts: tuple[AllowedHost, ...] = ()

    def source(self, url: str) -> Source:
        """Parse and check a URL.

        Raises:
            InvalidRequest: the URL is not allowed, or not in canonical spelling.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return _inline(url)
        if scheme not in ("file", *PORTS):
            raise InvalidRequest(f"{_format_authority(url)} is no data:, file: or https: URL; {REMEDY}")
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidRequest(
                f"the URL {_format_authority(url)} has {len(url)} characters; at most {MAX_URL_CHARACTERS}"
            )
        if not PLAIN.fullmatch(url):
            raise InvalidRequest(
                f"the URL {_format_authority(url)} has a blank, a backslash or a non-ASCII character; percent-encode "
                f"its path, "
                f"and write its host's name in the form that begins with xn--"
            )
        return self._local(url) if scheme == "file" else self._remote(url)

    def redirected(self, source: RemoteFile, location: str) -> RemoteFile:
        """Return the target of a redirect from `source`.

        Raises:
            InvalidRequest: the target is not allowed, or is http after https.
        """
        if location.startswith("/") and not location.startswith("//"):
            location = f"{RemoteFile(source.scheme, source.host, source.port, '').url}{location}"
        there = self.source(location) if REMOTE.fullmatch(location) else None
        if not isinstance(there, RemoteFile):
            raise InvalidRequest(f"{source.host} redirects to {_format_authority(location)}, which is not followed")
        if source.scheme == "https" and there.scheme != "https":
            raise InvalidRequest(f"{source.host} redirects from https to http, which is not followed")
        return there

    def _local(self, url: str) -> LocalFile:
        if self.local_path is None:
            raise InvalidRequest(f"files of the server are not read here (--allowed-local-media-path); {REMEDY}")
        match = re.fullmatch(r"file://(?:localhost)?(/[^?#]*)", url, re.IGNORECASE)
        path = unquote(match.group(1)) if match else ""
        if not path or "\0" in path:
            raise InvalidRequest(
                f"{_format_authority(url)} is no file's URL; write file:///folder/file, ? and # percent-encoded"
            )
        return LocalFile(path)

    def _remote(self, url: str) -> RemoteFile:
        if not self.hosts:
            raise InvalidRequest(f"nothing is fetched from other hosts here (--allowed-media-domains); {REMEDY}")
        match = REMOTE.fullmatch(url)
        authority = match.group(2) if match else ""
        if "@" in authority:
            raise InvalidRequest("the URL has credentials before its host, which are not sent; leave them out")
        parts = AUTHORITY.fullmatch(authority)
        host = _host(parts.group(1)) if parts else None
        if match is None or parts is None or host is None:
            raise InvalidRequest(
                f"the URL {_format_authority(url)} has no host in canonical spelling; write a name such as "
                f"images.example.com, "
                f"or a whole address in its usual form"
            )
        scheme: Literal["http", "https"] = "https" if match.group(1).lower() == "https" else "http"
        port = int(parts.group(2) or PORTS[scheme])
        allowed = any(a.host == host and port == (a.port or PORTS[scheme]) for a in self.hosts)
        if not allowed:
            raise InvalidRequest(
                f"{_format_authority(authority)} is not an allowed host (--allowed-media-domains); {REMEDY}"
            )
        target = match.group(3)
        return RemoteFile(scheme, host, port, target if target.startswith("/") else f"/{target}")


NOTHING_ELSE = AllowedSources()
"""Allows only data: URLs."""


def _inline(url: str) -> Inline:
    match = INLINE.match(url)
    if match is None or not url.isascii():
        raise InvalidRequest(f"{_format_authority(url)} is no data: URL of base64; write data:image/png;base64,…")
    return Inline(match.group(1).lower(), url[match.end() :])


def _host(text: str) -> str | None:
    """The one form of a host; None when this is none, or one that could be read as another."""
    if text.startswith("["):
        return _address(text[1:-1], ipaddress.IPv6Address)
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if NUMBER.fullmatch(labels[-1]):
        return _address(text, ipaddress.IPv4Address)
    if len(name) > 253 or not all(map(LABEL.fullmatch, labels)):
        return None
    return name


def _address(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> str | None:
    try:
        return str(kind(text))
    except ValueError:
        return None


def _format_authority(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…")
