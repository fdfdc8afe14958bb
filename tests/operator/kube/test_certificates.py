"""The webhook's certificates: checkable by what clients trust, renewed in time, never all at once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from trimtab_operator.kube.certificates import Certificates, fresh, renewed, service_names

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = service_names("webhook", "trimtab-system")


def is_signed_by(leaf: bytes, ca: bytes) -> bool:
    certificate = x509.load_pem_x509_certificate(leaf)
    key = x509.load_pem_x509_certificate(ca).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    return True


def test_a_fresh_leaf_is_for_the_services_names_and_signed_by_its_authority() -> None:
    made = fresh(NAMES, now=NOW)
    assert is_signed_by(made.leaf, made.ca)
    extension = x509.load_pem_x509_certificate(made.leaf).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert extension.value.get_values_for_type(x509.DNSName) == NAMES


def test_a_good_certificate_is_kept() -> None:
    assert renewed(fresh(NAMES, now=NOW), NAMES, now=NOW + timedelta(days=200)) is None


def test_a_leaf_is_renewed_before_its_end_under_the_same_authority() -> None:
    made = fresh(NAMES, now=NOW)
    successor = renewed(made, NAMES, now=NOW + timedelta(days=310))
    assert successor is not None
    assert successor.bundle == made.bundle
    assert is_signed_by(successor.leaf, made.ca)


def test_other_names_are_a_reason_to_renew() -> None:
    assert renewed(fresh(NAMES, now=NOW), ["other.ns.svc"], now=NOW) is not None


def test_an_authority_near_its_end_gets_a_successor_and_both_are_trusted() -> None:
    made = fresh(NAMES, now=NOW)
    successor = renewed(made, NAMES, now=NOW + timedelta(days=3400))
    assert successor is not None
    assert len(x509.load_pem_x509_certificates(successor.bundle)) == 2
    assert is_signed_by(successor.leaf, successor.ca)


def test_a_damaged_secret_is_made_anew() -> None:
    made = fresh(NAMES, now=NOW)
    assert renewed(replace(made, leaf=b"nonsense"), NAMES, now=NOW) is not None


def test_what_is_stored_can_be_read_back() -> None:
    made = fresh(NAMES, now=NOW)
    assert Certificates.from_secret(made.as_secret()) == made
    assert Certificates.from_secret({"ca.crt": b""}) is None
