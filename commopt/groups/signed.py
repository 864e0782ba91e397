# SPDX-License-Identifier: Apache-2.0
"""Values that show who wrote them: with a secret that all ranks share, HMAC-SHA256 of the key and the value."""

from __future__ import annotations

import hmac
import os

from commopt.errors import TransportError

SECRET = "COMMOPT_SECRET"
_MARK = b"commopt-hmac-sha256:"
_DIGEST_NBYTES = 64  # as hexadecimal digits


def own_secret() -> bytes | None:
    """Return what COMMOPT_SECRET holds, without white space around it; None where that is nothing: then not signed."""
    return os.environb.get(SECRET.encode(), b"").strip() or None


def seal(secret: bytes | None, key: str, value: str) -> str:
    """Return what to write under `key`: the value, signed if there is a secret."""
    if secret is None:
        return value
    return f"{_MARK.decode()}{_digest(secret, key, value.encode())}:{value}"


def unseal(secret: bytes | None, key: str, written: bytes) -> bytes:
    """Return the value that stands under `key`.

    Raises TransportError when there is a secret and the value is not signed with it, or was signed for another key;
    and when it is signed and there is none.
    """
    head = len(_MARK) + _DIGEST_NBYTES
    signed = written.startswith(_MARK) and written[head : head + 1] == b":"
    if secret is None and not signed:
        return written
    value = written[head + 1 :]
    given = written[len(_MARK) : head]
    if secret is not None and signed and hmac.compare_digest(given, _digest(secret, key, value).encode()):
        return value
    who = "is signed, and this rank has no" if secret is None else "is not signed with this rank's"
    raise TransportError(
        f"what stands under {key!r} in the rendezvous store {who} {SECRET}: somebody else wrote it, or the ranks have "
        f"different secrets; export the same {SECRET} on all ranks"
    )


def _digest(secret: bytes, key: str, value: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + value, "sha256").hexdigest()
