"""The sha256 of an image's encoded bytes: how it is written, and that it holds."""

from __future__ import annotations

import hashlib
import re

from pipeline.errors import RequestError


def normal_digest(text: str, where: str) -> str:
    """64 lower-case hexadecimal digits; "sha256:" in front is accepted. Raises RequestError."""
    digest = text.lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise RequestError(f"{where}: its sha256 must be 64 hexadecimal digits, with or without 'sha256:' in front")
    return digest


def check_digest(data: bytes, expected: str | None, where: str) -> None:
    """Raise RequestError unless the bytes are those that were asked for; None asks for nothing."""
    if expected is None:
        return
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise RequestError(
            f"{where}: its bytes have sha256 {found}, the job asks for {expected}; "
            "correct the reference or restore the image"
        )
