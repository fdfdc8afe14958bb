"""Mutual authentication of a replica's nodes with a shared secret.

A stream begins with a challenge-response handshake, and every later message carries a MAC over a counter and the
message, so that none is changed, replayed or injected. ZMQ sockets use CURVE with long-term keys derived from the
secret, so both ends must know it. The secret itself is never sent.
"""

import asyncio
import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from trimtab_engine.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
GREETING = b"TRIMTAB1"  # first bytes of an authenticating listener
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
PROOF_SECONDS = 5.0  # for the peer's proof, which takes one hash


class AuthenticationFailed(Exception):
    """The peer does not know the secret, or is not a node."""


class ClosedBeforeHandshake(AuthenticationFailed):
    """The peer closed the connection without sending data, as a port check does."""


class SharedSecret:
    """A secret given to all nodes of a replica. Each purpose derives its own key."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: str | None) -> "SharedSecret | None":
        """Return the stripped content of the file. None without a file.

        Raises:
            ConfigError: If the file cannot be read or is too short.
        """
        if path is None:
            return None
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--rendezvous-secret-file {path}: {error.strerror}") from None
        secret = content.strip()
        if not MIN_SECRET_BYTES <= len(secret) <= len(content) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"--rendezvous-secret-file {path} has {len(content)} bytes; it must hold a secret of "
                f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, the same on every node"
            )
        return cls(secret)

    def key(self, purpose: bytes, *nonces: bytes) -> bytes:
        """Return a 32-byte key derived for this purpose."""
        return hmac.new(self._secret, b"\0".join((b"trimtab", purpose, *nonces)), hashlib.sha256).digest()

    def set_curve_server(self, socket: "zmq.Socket[Any]") -> None:
        """Make a ZMQ socket, before bind, accept only peers that know the secret."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self.key(b"listener")))
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def set_curve_client(self, socket: "zmq.Socket[Any]") -> None:
        """Make a ZMQ socket, before connect, reach only peers that know the secret."""
        own = z85.encode(self.key(b"caller"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, own)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(self.key(b"listener"))))


class MessageAuthenticator:
    """Message authentication codes for one direction, in message order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def close(self, message: bytes) -> bytes:
        """Return the message with its code prepended."""
        return self._code(message) + message

    def open(self, sealed: bytes) -> bytes:
        """Verify and return the message made by close() on the other side.

        Raises:
            AuthenticationFailed: If the code is wrong.
        """
        code, message = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        if not hmac.compare_digest(code, self._code(message)):
            raise AuthenticationFailed("message with a wrong authentication code")
        return message

    def _code(self, message: bytes) -> bytes:
        code = hmac.new(self._key, self._count.to_bytes(8, "big") + message, hashlib.sha256).digest()
        self._count += 1
        return code


class ConnectionAuthenticator:
    """Authenticators for both directions of a connection, from one side's view."""

    __slots__ = ("incoming", "outgoing")

    def __init__(self, incoming: MessageAuthenticator, outgoing: MessageAuthenticator) -> None:
        self.incoming, self.outgoing = incoming, outgoing


async def authenticate_as_listener(
    secret: SharedSecret, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> ConnectionAuthenticator:
    """Send the challenge and verify that the caller knows the secret.

    Raises:
        AuthenticationFailed: If it does not.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    writer.write(GREETING + own)
    answer = await _read(reader, NONCE_BYTES + PROOF_BYTES)
    nonces = own, answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], secret.key(b"caller's proof", *nonces)):
        raise AuthenticationFailed("the secrets differ")
    writer.write(secret.key(b"listener's proof", *nonces))
    return ConnectionAuthenticator(
        MessageAuthenticator(secret.key(b"to listener", *nonces)),
        MessageAuthenticator(secret.key(b"to caller", *nonces)),
    )


async def authenticate_as_caller(
    secret: SharedSecret, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> ConnectionAuthenticator:
    """Answer the listener's challenge and verify that it knows the secret.

    Raises:
        AuthenticationFailed: If it does not.
    """
    greeting = await _read(reader, len(GREETING) + NONCE_BYTES)
    if not greeting.startswith(GREETING):
        raise AuthenticationFailed("the peer does not request authentication")
    nonces = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    writer.write(nonces[1] + secret.key(b"caller's proof", *nonces))
    try:
        proof = await _read(reader, PROOF_BYTES)
    except ClosedBeforeHandshake:
        proof = b""
    if not hmac.compare_digest(proof, secret.key(b"listener's proof", *nonces)):
        raise AuthenticationFailed("the secrets differ")
    return ConnectionAuthenticator(
        MessageAuthenticator(secret.key(b"to caller", *nonces)),
        MessageAuthenticator(secret.key(b"to listener", *nonces)),
    )


async def _read(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await reader.readexactly(num_bytes)
    except TimeoutError:
        raise AuthenticationFailed(f"no proof of the secret within {PROOF_SECONDS:g} s") from None
    except (asyncio.IncompleteReadError, OSError) as error:
        ended = "the peer closed the connection before proving that it has the secret"
        partial = error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
        raise (AuthenticationFailed if partial else ClosedBeforeHandshake)(ended) from None
