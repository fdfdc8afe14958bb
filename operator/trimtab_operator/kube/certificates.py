"""Certificates of the webhook: a private CA and a leaf for the Service's DNS names. Pure except for randomness.

They are stored in one Secret that all operator pods share. The leaf is renewed RENEW_BEFORE its end. The CA is renewed
as well; while the new CA is recent, the bundle contains both, so every API server can verify every certificate in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=365)
RENEW_BEFORE = timedelta(days=60)
CLOCK_SKEW = timedelta(hours=1)  # tolerated for a late clock of the API server


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM certificates and keys. `bundle` is the trust bundle: the CA, and the previous CA while it is valid."""

    ca_key: bytes
    ca: bytes
    bundle: bytes
    key: bytes
    leaf: bytes

    def as_secret(self) -> dict[str, bytes]:
        return {
            "ca.key": self.ca_key,
            "ca.crt": self.ca,
            "bundle.crt": self.bundle,
            "tls.key": self.key,
            "tls.crt": self.leaf,
        }

    @classmethod
    def from_secret(cls, data: Mapping[str, bytes]) -> Certificates | None:
        """Return the certificates in a Secret's data. None if an entry is missing."""
        try:
            return cls(data["ca.key"], data["ca.crt"], data["bundle.crt"], data["tls.key"], data["tls.crt"])
        except KeyError:
            return None


def issue(names: list[str], *, now: datetime) -> Certificates:
    """Return a new CA and a leaf for these DNS names."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trimtab-operator webhook CA")])
    ca = (
        _builder(name, name, ca_key.public_key(), now, CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    key, leaf = _leaf(names, ca, ca_key, now)
    ca_pem = _pem(ca)
    return Certificates(_key_pem(ca_key), ca_pem, ca_pem, _key_pem(key), _pem(leaf))


def renew_if_needed(current: Certificates, names: list[str], *, now: datetime) -> Certificates | None:
    """Return the renewed certificates. None if `current` is valid, readable and for these names."""
    try:
        ca = x509.load_pem_x509_certificate(current.ca)
        leaf = x509.load_pem_x509_certificate(current.leaf)
        ca_key = serialization.load_pem_private_key(current.ca_key, password=None)
        serialization.load_pem_private_key(current.key, password=None)
    except ValueError:
        return issue(names, now=now)
    if ca.not_valid_after_utc - now < LEAF_LIFETIME:
        successor = issue(names, now=now)
        is_valid = ca.not_valid_after_utc > now
        bundle = successor.ca + (current.ca if is_valid else b"")
        return Certificates(successor.ca_key, successor.ca, bundle, successor.key, successor.leaf)
    if leaf.not_valid_after_utc - now > RENEW_BEFORE and names_of(leaf) == sorted(names):
        return None
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key, new_leaf = _leaf(names, ca, ca_key, now)
    return Certificates(current.ca_key, current.ca, current.bundle, _key_pem(key), _pem(new_leaf))


def expiry_of(certificate: bytes) -> datetime:
    """Return when a PEM certificate expires."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the sorted DNS names of a certificate."""
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return sorted(extension.value.get_values_for_type(x509.DNSName))


def service_names(service: str, namespace: str) -> list[str]:
    """Return the DNS names by which an API server addresses a Service."""
    return [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]


def _leaf(
    names: list[str], ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    leaf = (
        _builder(subject, ca.subject, key.public_key(), now, LEAF_LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    return key, leaf


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
