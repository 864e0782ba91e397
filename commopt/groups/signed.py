# SPDX-License-Identifier: Apache-2.0
"""Signed values in the rendezvous store: HMAC-SHA256 of key and value with a secret that all ranks share."""

from __future__ import annotations

import hmac
import os

from commopt.errors import TransportError

SECRET = "COMMOPT_SECRET"
_MARK = b"commopt-hmac-sha256:"
_DIGEST_NBYTES = 64  # as hexadecimal digits


def own_secret() -> bytes | None:
    """Return the value of COMMOPT_SECRET, without white space around it; None, for no signatures, if it is empty."""
    return os.environb.get(SECRET.encode(), b"").strip() or None


def seal(secret: bytes | None, key: str, value: str) -> str:
    """Return the value to write under `key`, signed if there is a secret."""
    if secret is None:
        return value
    return f"{_MARK.decode()}{_digest(secret, key, value.encode())}:{value}"


def unseal(secret: bytes | None, key: str, written: bytes) -> bytes:
    """Return the value in a text written by `seal` under `key`.

    Raises TransportError if the value is not signed with the secret or was signed for another key, and if it is signed
    although there is no secret.
    """
    head = len(_MARK) + _DIGEST_NBYTES
    signed = written.startswith(_MARK) and written[head : head + 1] == b":"
    if secret is None and not signed:
        return written
    value = written[head + 1 :]
    given = written[len(_MARK) : head]
    if secret is not None and signed and hmac.compare_digest(given, _digest(secret, key, value).encode()):
        return value
    problem = "is signed, and this rank has no" if secret is None else "is not signed with this rank's"
    raise TransportError(
        f"the value of {key!r} in the rendezvous store {problem} {SECRET}: another program wrote it, or the ranks have "
        f"different secrets; export the same {SECRET} on all ranks"
    )


def _digest(secret: bytes, key: str, value: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + value, "sha256").hexdigest()
