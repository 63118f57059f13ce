"""`CaseSigner`: writes the spec of a drawn case as a token, and reads only tokens that it signed.

A token is `payload.signature`, both in base64url without padding (RFC 4648, section 5). The payload
is JSON with sorted names; the signature is HMAC-SHA256 (RFC 2104). The payload is no secret.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Final

from qkv.errors import InvalidContent, QkvError
from qkv.testing.case_spec import CaseSpec

__all__ = ["MAX_TOKEN_LENGTH", "CaseSigner"]

MAX_TOKEN_LENGTH: Final = 4096
"""Most characters of a token; the longest that the service writes has about 1,000."""

_PURPOSE: Final = b"qkv case token"  # separates this key from other uses of the secret
_FORMAT: Final = 1


class CaseSigner:
    """Signs cases, and reads them again. Processes with the same secret read each other's tokens.

    Args:
        secret: of the service.
    """

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE, sha256)

    def write(self, spec: CaseSpec, digest: str) -> str:
        """Returns the token of a case.

        Args:
            spec: of the case.
            digest: of its inputs.
        """
        fields = {"format": _FORMAT, "spec": spec.to_json(), "digest": digest}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        payload = _encode(text.encode())
        return f"{payload}.{self._signature(payload)}"

    def read(self, token: str) -> tuple[CaseSpec, str]:
        """Returns the spec of a case and the digest of its inputs.

        Raises:
            InvalidContent: the service did not write the token, or another version did.
        """
        payload, _, signature = token.partition(".")
        if len(token) > MAX_TOKEN_LENGTH or not hmac.compare_digest(
            self._signature(payload).encode(), signature.encode("utf-8", "replace")
        ):
            raise InvalidContent(
                "case is invalid: expected an unchanged token of this service and its secret",
                pointer="/case",
            )
        # signed, so the rest is as `write` left it
        fields = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        try:
            if fields["format"] != _FORMAT:
                raise InvalidContent("its format is another")
            return CaseSpec.from_json(fields["spec"]), fields["digest"]
        except QkvError as error:
            raise InvalidContent(
                f"case was drawn by another version of the service: {error.detail}; draw a new one",
                pointer="/case",
            ) from None

    def _signature(self, payload: str) -> str:
        data = payload.encode("utf-8", "replace")
        return _encode(hmac.digest(self._key, data, sha256))


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
