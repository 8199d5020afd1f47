"""Files written by `coterie deploy`: a Flower app, and keys to try it with TLS and authentication."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, StorageError

_SCRIPTS = ("env.sh", "superlink.sh", "supernode.sh", "register.sh", "run.sh")
_FILES = (
    "pyproject.toml",
    "README.md",
    "sites/task.py",
    "sites/server.py",
    "sites/client.py",
    *_SCRIPTS,
    "compose.yaml",
)
_IGNORED = "keys/\nstate/\n.flwr/\nruns/\n*.fab\n__pycache__/\n"
_SERVICE = """  site-{number}:
    image: ${{COTERIE_IMAGE:?an image with coterie[flower]}}
    command: ["bash", "supernode.sh", "{number}"]
    environment: {{ COTERIE_HOST: "superlink", COTERIE_PORT: "8200" }}
    volumes: [".:/app"]
    working_dir: /app
    depends_on: [superlink]"""


def write_app(folder: Path, name: str | None = None, nodes: int = 4) -> list[Path]:
    """Write the app into a new or empty folder; returns its files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder} exists and is not empty; choose another folder.")
    plain = re.sub(r"[^a-z0-9-]+", "-", (name or folder.resolve().name).lower()).strip("-")
    if not plain:
        raise ConfigError(f"--name must contain a letter or a digit. Got '{name or folder.resolve().name}' instead.")
    values = {
        "name": plain,
        "nodes": str(nodes),
        "last": str(nodes - 1),
        "runs": str(folder.resolve() / "runs"),
        "keys": str(folder.resolve() / "keys"),
        "services": "\n".join(_SERVICE.format(number=number) for number in range(nodes)),
    }
    made = []
    for file in _FILES:
        path = folder / file
        text = files("coterie.deploy").joinpath("template", f"{path.name}.txt").read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace("{{" + key + "}}", value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
        made.append(path)
    (folder / "sites" / "__init__.py").write_text('"""The Flower app."""\n', encoding="utf-8")
    (folder / ".gitignore").write_text(_IGNORED, encoding="utf-8")
    return made


def write_keys(folder: Path, nodes: int, hosts: Sequence[str], days: int = 90) -> list[Path]:
    """Write a CA, a server certificate for these hosts and a key pair per node into `folder`/keys.

    For trials only: the folder contains all private keys. Existing files are never replaced.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    keys = folder / "keys"
    keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = serialization.Encoding.PEM
    no_password = serialization.NoEncryption()
    made: list[Path] = []

    def save(name: str, data: bytes, mode: int) -> None:
        handle = os.open(keys / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        made.append(keys / name)

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, public: Any, issuer: str, signer: Any, extensions: list[Any]) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(issuer))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(signer, hashes.SHA384())

    if not (keys / "ca.crt").exists():
        ca = ec.generate_private_key(ec.SECP384R1())
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        own = x509.SubjectKeyIdentifier.from_public_key(ca.public_key())
        extensions: list[Any] = [(x509.BasicConstraints(ca=True, path_length=0), True), (signs, True), (own, False)]
        root = certificate("coterie trial CA", ca.public_key(), "coterie trial CA", ca, extensions)
        save("ca.crt", root.public_bytes(pem), 0o644)
        save("ca.key", ca.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password), 0o600)
        server = ec.generate_private_key(ec.SECP384R1())
        names: list[Any] = [_host(host) for host in hosts]
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
        extensions = [(x509.SubjectAlternativeName(names), False), (by, False)]
        extensions.append((x509.BasicConstraints(ca=False, path_length=None), True))
        extensions.append((x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False))
        leaf = certificate(hosts[0], server.public_key(), "coterie trial CA", ca, extensions)
        save("server.pem", leaf.public_bytes(pem), 0o644)
        save("server.key", server.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password), 0o600)
    for number in range(nodes):
        if (keys / f"site-{number}").exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, no_password)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        save(f"site-{number}", private, 0o600)
        save(f"site-{number}.pub", public + b"\n", 0o644)
    return made


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
