"""Keys and certificates of a federation: who the server is, and who may take part."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.storage.files import make_folder, sync_folder

CA_KEY, CA_CERTIFICATE = "ca.key", "ca.crt"
SERVER_KEY, SERVER_CERTIFICATE = "server.key", "server.crt"
NODE_KEY, NODE_PUBLIC = "node.key", "node.pub"
SITE_FILE = "site.json"  # in the folder of a site: its client
SERVER, SITES = "server", "sites"  # folders: of the server, and in it of the sites' public keys
PRIVATE, PUBLIC = 0o600, 0o644  # modes of files
HERE = ("localhost", "127.0.0.1")  # the server is also asked from its own machine
CLOCK = datetime.timedelta(minutes=5)  # by which clocks of machines may differ

Key = ec.EllipticCurvePrivateKey


def make_keys(folder: Path, hosts: Sequence[str], sites: int, days: int = 365) -> list[Path]:
    """Make what a federation needs: in `server/` the certificates of its server, and for every site a folder that goes
    to this site's machine. What is there already stays; returns the folders."""
    make_folder(folder)
    made = [make_server(folder / SERVER, hosts, days)]
    for client in range(sites):
        made.append(make_site(folder / f"site-{client}", client, folder / SERVER))
    return made


def make_server(folder: Path, hosts: Sequence[str], days: int = 365) -> Path:
    """A certificate authority, and a certificate for a server that is reached under these names or addresses."""
    if not hosts:
        raise UserError("A server needs the name or address under which sites reach it; give --host.")
    _private_folder(folder)
    make_folder(folder / SITES)
    if not (folder / CA_KEY).exists():
        key = ec.generate_private_key(ec.SECP384R1())
        authority = _certificate(key, "FedLoom federation", key.public_key(), "FedLoom federation", days, ca=True)
        _write(folder / CA_KEY, _pem(key), PRIVATE)
        _write(folder / CA_CERTIFICATE, authority.public_bytes(serialization.Encoding.PEM), PUBLIC)
    if not (folder / SERVER_KEY).exists():
        authority_key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        assert isinstance(authority_key, Key)
        key = ec.generate_private_key(ec.SECP384R1())
        names = dict.fromkeys((*hosts, *HERE))
        own = _certificate(authority_key, "FedLoom federation", key.public_key(), hosts[0], days, hosts=list(names))
        _write(folder / SERVER_KEY, _pem(key), PRIVATE)
        _write(folder / SERVER_CERTIFICATE, own.public_bytes(serialization.Encoding.PEM), PUBLIC)
    return folder


def make_site(folder: Path, client: int, server: Path) -> Path:
    """A site's key. Its public half is left with the server, which knows this client by it from then on."""
    _private_folder(folder)
    if not (folder / NODE_KEY).exists():
        known = server / SITES / f"client-{client}.pub"
        if known.exists():
            raise UserError(
                f"Client {client} has a key already: {known}; remove it first if the key is to be replaced."
            )
        key = ec.generate_private_key(ec.SECP384R1())
        formats = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        _write(folder / NODE_KEY, key.private_bytes(*formats), PRIVATE)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _write(folder / NODE_PUBLIC, public + b"\n", PUBLIC)
        _write(known, public + b"\n", PUBLIC)
        _write(folder / CA_CERTIFICATE, (server / CA_CERTIFICATE).read_bytes(), PUBLIC)
        _write(folder / SITE_FILE, json.dumps({"client": client}).encode(), PUBLIC)
    return folder


def in_pem(key: bytes) -> bytes:
    """A site's public key in the format of Flower's requests."""
    public = serialization.load_ssh_public_key(key)
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def client_of(folder: Path) -> int:
    """The client of a site's folder; raises UserError if the folder is none."""
    path = folder / SITE_FILE
    if not path.exists():
        raise UserError(f"{path} is missing; a site's folder is made with 'fedloom keys'.")
    try:
        return int(json.loads(path.read_text())["client"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; copy the site's folder from where it was made.") from None


def _certificate(
    signer: Key, issuer: str, public: ec.EllipticCurvePublicKey, subject: str, days: int, *, ca: bool = False,
    hosts: Sequence[str] = (),
) -> x509.Certificate:  # fmt: skip
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(ca), critical=True)
    )
    if not ca:
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return made.sign(signer, hashes.SHA384())


def _usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: Key) -> bytes:
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*formats)


def _private_folder(folder: Path) -> None:
    """Make a folder that only its owner reads; one that is there already keeps its mode."""
    if not folder.exists():
        make_folder(folder)
        folder.chmod(0o700)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a new file, readable for others only if it may be."""
    with oserror_as_user_error(path):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        sync_folder(path.parent)
