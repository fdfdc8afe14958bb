"""Webhook certificates: verifiable by clients, renewed in time, and never all at once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from trimtab_operator.kube.certificates import Certificates, issue, renew_if_needed, service_names

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = service_names("webhook", "trimtab-system")


def is_signed_by(leaf: bytes, ca: bytes) -> bool:
    certificate = x509.load_pem_x509_certificate(leaf)
    key = x509.load_pem_x509_certificate(ca).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    return True


def test_issued_leaf_has_service_names_and_ca() -> None:
    made = issue(NAMES, now=NOW)
    assert is_signed_by(made.leaf, made.ca)
    extension = x509.load_pem_x509_certificate(made.leaf).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert extension.value.get_values_for_type(x509.DNSName) == NAMES


def test_valid_certificate_is_kept() -> None:
    assert renew_if_needed(issue(NAMES, now=NOW), NAMES, now=NOW + timedelta(days=200)) is None


def test_leaf_is_renewed_before_expiry() -> None:
    made = issue(NAMES, now=NOW)
    successor = renew_if_needed(made, NAMES, now=NOW + timedelta(days=310))
    assert successor is not None
    assert successor.bundle == made.bundle
    assert is_signed_by(successor.leaf, made.ca)


def test_changed_names_renew_leaf() -> None:
    assert renew_if_needed(issue(NAMES, now=NOW), ["other.ns.svc"], now=NOW) is not None


def test_renewed_ca_keeps_old_ca_trusted() -> None:
    made = issue(NAMES, now=NOW)
    successor = renew_if_needed(made, NAMES, now=NOW + timedelta(days=3400))
    assert successor is not None
    assert len(x509.load_pem_x509_certificates(successor.bundle)) == 2
    assert is_signed_by(successor.leaf, successor.ca)


def test_damaged_secret_is_reissued() -> None:
    made = issue(NAMES, now=NOW)
    assert renew_if_needed(replace(made, leaf=b"nonsense"), NAMES, now=NOW) is not None


def test_secret_round_trip() -> None:
    made = issue(NAMES, now=NOW)
    assert Certificates.from_secret(made.as_secret()) == made
    assert Certificates.from_secret({"ca.crt": b""}) is None
