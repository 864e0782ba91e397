# SPDX-License-Identifier: Apache-2.0
"""The secret that all of a parameter server share: where it comes from, when there must be one, and keys made of it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from commopt.document import read_text
from commopt.errors import ConfigurationError

SECRET_VARIABLE = "COMMOPT_SECRET"
NONCE_NBYTES = 32
PROOF_NBYTES = 32
LOOPBACK = "127.0.0.1"
_ROUNDS = 100_000  # of PBKDF2: a short secret takes so much longer to guess
_MAKE_ONE = "make one with: python -c 'import secrets; print(secrets.token_hex())'"


@lru_cache(maxsize=8)
def key_of(secret: str) -> bytes:
    """Return the key that a secret stands for; "" is no secret, which must be alike on both sides too."""
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"commopt parameter server", _ROUNDS)


def given_secret(secret: str | None) -> str:
    """Return `secret`, or that of the environment where it is None; "" where there is none."""
    return os.environ.get(SECRET_VARIABLE, "").strip() if secret is None else secret


def read_secret(path: str | Path) -> str:
    """Return the secret in a file, without white space around it. Raises ConfigurationError when there is none."""
    secret = read_text(path).strip()
    if not secret:
        raise ConfigurationError(f"{path} is empty, and should hold the secret; {_MAKE_ONE}")
    return secret


def require_secret(host: str, secret: str) -> None:
    """Raise ConfigurationError where other machines could connect, and nobody would have to show a secret."""
    if not secret and not is_loopback(host):
        raise ConfigurationError(
            f"listening on {host} lets other machines connect, and there is no secret; set {SECRET_VARIABLE}, or pass "
            f"--secret-file FILE, alike to the scheduler, the server and the workers ({_MAKE_ONE}), or listen on "
            f"{LOOPBACK}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. Raises ConfigurationError for a name without an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{host!r} is no address of this machine: {error}; pass another --host") from None
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


@dataclass(frozen=True)
class Keys:
    """What signs the frames of one connection, each direction by its own key."""

    of_client: bytes
    of_server: bytes


@dataclass(frozen=True)
class Handshake:
    """What both sides compute from their key and the two nonces, which are drawn anew for each connection."""

    key: bytes
    server_nonce: bytes
    client_nonce: bytes

    def proof(self, role: str) -> bytes:
        """Return what shows that `role` ("client", "server") has the key; neither can be made of the other."""
        return hmac.digest(self.key, role.encode() + b" proof" + self.server_nonce + self.client_nonce, "sha256")

    def shown_by(self, role: str, proof: bytes) -> bool:
        """Return, in constant time, whether a proof is right."""
        return hmac.compare_digest(self.proof(role), proof)

    def keys(self) -> Keys:
        """Return the keys of the connection."""
        nonces = self.server_nonce + self.client_nonce
        client, server = (
            hmac.digest(self.key, role + b" frames" + nonces, "sha256") for role in (b"client", b"server")
        )
        return Keys(client, server)
