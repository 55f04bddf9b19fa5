"""Ids in the paths of routes: any text, slashes and line ends too (`{name:path}` takes no line ends)."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor

ROLLOUT_ID = "{rollout_id:any}"


class AnyText(Convertor[str]):
    """As it came."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        """From the path."""
        return value

    def to_string(self, value: str) -> str:
        """To the path."""
        return value


register_url_convertor("any", AnyText())
