"""Certificates: what a server beyond loopback shows. Without one of the operator's it makes its own at the first start."""

import datetime
import ipaddress
import os
import socket
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from dsec.model.errors import InvalidArgument
from dsec.ports.clock import Clock

__all__ = ["Certificate", "fingerprint_of", "own_certificate"]

_DAYS = 3650


class Certificate(Struct, frozen=True):
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


def fingerprint_of(cert: Path) -> str:
    """SHA-256 of the certificate, as openssl prints it. Raises InvalidArgument for a file that holds none."""
    try:
        found = x509.load_pem_x509_certificate(cert.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{cert}: {error}", field="server.tls_cert") from error
    return found.fingerprint(hashes.SHA256()).hex(":").upper()


def own_certificate(folder: Path, host: str, clock: Clock) -> Certificate:
    """The self-signed certificate in `folder`, made if there is none for `host` yet. Clients name its file as DSEC_CA_FILE.

    One for all addresses names those by which the host is reached now; it stays when they change, for clients hold it.
    """
    kept = Certificate(folder / "cert.pem", folder / "key.pem")
    names = _names(host)
    if kept.cert.exists() and kept.key.exists() and _covers(kept.cert, names):
        return kept
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    _write(kept.key, key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ), 0o600)  # fmt: skip
    _write(kept.cert, _sign(key, [*names, *_addresses(host)], clock).public_bytes(serialization.Encoding.PEM), 0o644)
    return kept


def _names(host: str) -> list[x509.GeneralName]:
    wanted = [host, socket.gethostname(), "localhost", "127.0.0.1", "::1"]
    names: list[x509.GeneralName] = []
    for name in dict.fromkeys(wanted):
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            names.append(x509.DNSName(name))
        else:
            if not address.is_unspecified:
                names.append(x509.IPAddress(address))
    return names


def _addresses(host: str) -> list[x509.GeneralName]:
    """The host's own address on the way out, of each family, where `host` stands for all of them."""
    if host not in ("0.0.0.0", "::"):
        return []
    found: list[x509.GeneralName] = []
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect((elsewhere, 9))  # sends nothing; the kernel chooses a route
                found.append(x509.IPAddress(ipaddress.ip_address(way.getsockname()[0])))
        except OSError:
            continue  # no such family, or no way out
    return found


def _covers(cert: Path, names: list[x509.GeneralName]) -> bool:
    found = x509.load_pem_x509_certificate(cert.read_bytes())
    shown = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names) <= set(shown)


def _sign(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], clock: Clock) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "DSec node")])
    start = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC) - datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(clock.random(16), "big") >> 1 | 1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
