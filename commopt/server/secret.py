# SPDX-License-Identifier: Apache-2.0
"""The secret that scheduler, server and workers share: its sources, when it is required, and the keys derived."""

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
_ROUNDS = 100_000  # of PBKDF2, which make a short secret slower to guess
_MAKE_ONE = "make one with: python -c 'import secrets; print(secrets.token_hex())'"


@lru_cache(maxsize=8)
def key_of(secret: str) -> bytes:
    """Return the key derived from a secret. Without a secret ("") both sides derive the same key from nothing."""
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"commopt parameter server", _ROUNDS)


def given_secret(secret: str | None) -> str:
    """Return `secret`; for None the value of COMMOPT_SECRET, or "" if that is unset."""
    return os.environ.get(SECRET_VARIABLE, "").strip() if secret is None else secret


def read_secret(path: str | Path) -> str:
    """Return the secret in a file, without white space around it. Raises ConfigurationError for an empty file."""
    secret = read_text(path).strip()
    if not secret:
        raise ConfigurationError(f"{path} is empty, and must hold the secret; {_MAKE_ONE}")
    return secret


def require_secret(host: str, secret: str) -> None:
    """Raise ConfigurationError if other machines could connect without a secret."""
    if not secret and not is_loopback(host):
        raise ConfigurationError(
            f"listening on {host} lets other machines connect, and there is no secret; set {SECRET_VARIABLE}, or pass "
            f"--secret-file FILE, alike for the scheduler, the server and the workers ({_MAKE_ONE}), or listen on "
            f"{LOOPBACK}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address. Raises ConfigurationError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{host!r} is not an address of this machine: {error}; pass another --host") from None
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


@dataclass(frozen=True)
class FrameKeys:
    """The keys that sign the frames of one connection, one for each direction."""

    of_client: bytes
    of_server: bytes


@dataclass(frozen=True)
class SecretHandshake:
    """Proofs and frame keys of one connection, computed by both sides from the key and two fresh nonces."""

    key: bytes
    server_nonce: bytes
    client_nonce: bytes

    def proof(self, role: str) -> bytes:
        """Return the proof that `role` ("client", "server") has the key. Neither proof reveals the other."""
        return hmac.digest(self.key, role.encode() + b" proof" + self.server_nonce + self.client_nonce, "sha256")

    def verify(self, role: str, proof: bytes) -> bool:
        """Return in constant time whether a proof is correct."""
        return hmac.compare_digest(self.proof(role), proof)

    def keys(self) -> FrameKeys:
        """Return the frame keys of the connection."""
        nonces = self.server_nonce + self.client_nonce
        client, server = (
            hmac.digest(self.key, role + b" frames" + nonces, "sha256") for role in (b"client", b"server")
        )
        return FrameKeys(client, server)
