"""Requests to a dashboard, exactly as given."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from tests.deadlines import HANG_S

OURS = {"Sec-Fetch-Site": "same-origin", "HX-Request": "true", "Content-Type": "application/x-www-form-urlencoded"}
"""What htmx and a browser send with an action from a page of the dashboard."""


class Answer:
    """Status, headers and text of one exchange."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()


def ask(port: int, path: str, headers: Mapping[str, str] = {}, body: str | None = None) -> Answer:
    """One request; the `Host` is the address unless `headers` has one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers))
        return Answer(connection.getresponse())
    finally:
        connection.close()
