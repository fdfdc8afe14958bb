"""What the nodes of one replica prove to each other before a word counts: that they were given the same secret.

A stream begins with a handshake in which each side answers the other's random number, and every message after it
carries a code that only the two can make, over a count, so that none is changed, repeated or slipped in. ZMQ's sockets
use CURVE, whose long-term keys are derived from the secret: only who knows it can greet the listener, and only who
knows it can be one. The secret itself never travels.
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
GREETING = b"TRIMTAB1"  # what a listener that asks for proof says first
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
PROOF_SECONDS = 5.0  # for the other side's proof: it has nothing to do but to compute a hash


class NotProven(Exception):
    """The other side does not know the secret, or is no node at all."""


class NothingSaid(NotProven):
    """The other side has left without a word, as somebody does who only looks whether anybody listens."""


class SharedSecret:
    """A secret that all nodes of a replica were given. Several purposes have keys of their own."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, path: str | None) -> "SharedSecret | None":
        """The content of the file, without the blanks around it; None without a file.

        Raises ConfigError for one that cannot be read or says too little.
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
        """32 bytes that nobody can make without the secret, others for every purpose."""
        return hmac.new(self._secret, b"\0".join((b"trimtab", purpose, *nonces)), hashlib.sha256).digest()

    def guard_listener(self, socket: "zmq.Socket[Any]") -> None:
        """Let a ZMQ socket, before it is bound, hear those alone who know the secret."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self.key(b"listener")))
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def guard_caller(self, socket: "zmq.Socket[Any]") -> None:
        """Let a ZMQ socket, before it is connected, reach those alone who know the secret."""
        own = z85.encode(self.key(b"caller"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, own)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(self.key(b"listener"))))


class Seal:
    """Codes for the messages that go one way, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def close(self, message: bytes) -> bytes:
        """The message behind its code."""
        return self._code(message) + message

    def open(self, sealed: bytes) -> bytes:
        """The message of what close() made on the other side. Raises NotProven for anything else."""
        code, message = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        if not hmac.compare_digest(code, self._code(message)):
            raise NotProven("a message whose code is wrong")
        return message

    def _code(self, message: bytes) -> bytes:
        code = hmac.new(self._key, self._count.to_bytes(8, "big") + message, hashlib.sha256).digest()
        self._count += 1
        return code


class Seals:
    """Both ways of one connection, as one of its sides sees them."""

    __slots__ = ("incoming", "outgoing")

    def __init__(self, incoming: Seal, outgoing: Seal) -> None:
        self.incoming, self.outgoing = incoming, outgoing


async def prove_as_listener(secret: SharedSecret, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seals:
    """Say the first word, and go on once the caller has proven that it knows the secret. Raises NotProven."""
    own = secrets.token_bytes(NONCE_BYTES)
    writer.write(GREETING + own)
    answer = await _read(reader, NONCE_BYTES + PROOF_BYTES)
    nonces = own, answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], secret.key(b"caller's proof", *nonces)):
        raise NotProven("it was given another secret")
    writer.write(secret.key(b"listener's proof", *nonces))
    return Seals(Seal(secret.key(b"to listener", *nonces)), Seal(secret.key(b"to caller", *nonces)))


async def prove_as_caller(secret: SharedSecret, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seals:
    """Answer the listener, and go on once it has proven that it knows the secret, too. Raises NotProven."""
    greeting = await _read(reader, len(GREETING) + NONCE_BYTES)
    if not greeting.startswith(GREETING):
        raise NotProven("it does not ask for the secret")
    nonces = greeting[len(GREETING) :], secrets.token_bytes(NONCE_BYTES)
    writer.write(nonces[1] + secret.key(b"caller's proof", *nonces))
    try:
        proof = await _read(reader, PROOF_BYTES)
    except NothingSaid:
        proof = b""
    if not hmac.compare_digest(proof, secret.key(b"listener's proof", *nonces)):
        raise NotProven("it was given another secret")
    return Seals(Seal(secret.key(b"to caller", *nonces)), Seal(secret.key(b"to listener", *nonces)))


async def _read(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        async with asyncio.timeout(PROOF_SECONDS):
            return await reader.readexactly(num_bytes)
    except TimeoutError:
        raise NotProven(f"it did not prove within {PROOF_SECONDS:g} s that it was given the secret") from None
    except (asyncio.IncompleteReadError, OSError) as error:
        ended = "it ended the connection instead of proving that it was given the same secret"
        partial = error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
        raise (NotProven if partial else NothingSaid)(ended) from None
