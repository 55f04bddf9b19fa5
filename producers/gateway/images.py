"""Images that messages name: by URL of a listed host, never by path or inline.

The worker fetches them, and checks host and address again; here a caller is told at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import RequestError
from pipeline.http.addresses import AllowedHosts
from pipeline.wire.messages import ImageRef, Message
from producers.gateway.refusals import Refusal


def images_of(messages: Sequence[Message], hosts: AllowedHosts) -> list[ImageRef]:
    """The image parts of the messages, in order. Raises Refusal (400) for a part that is not taken here."""
    found: list[ImageRef] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages.{place}.content.{at}"
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                continue
            if kind != "image_url":
                raise Refusal(
                    400, f"{where}: a part is of type text, with a text, or image_url, not {kind!r:.40}", where
                )
            shown = part.get("image_url")
            url = shown.get("url") if isinstance(shown, dict) else shown
            found.append(url_ref(url, where, hosts))
    if len(found) > 1:
        raise Refusal(400, f"the messages have {len(found)} images; one is supported", "messages")
    return found


def url_ref(url: object, where: str, hosts: AllowedHosts) -> ImageRef:
    """Raises Refusal (400) for what is no URL of a listed host."""
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://")):
        raise Refusal(400, f"{where}: an image is given by its http or https URL; data and files are not taken", where)
    try:
        hosts.admit(url, where)
    except RequestError as error:
        raise Refusal(400, str(error), where) from error
    return ImageRef(url=url)
