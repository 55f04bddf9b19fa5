"""Fixtures of this folder."""

from tests.image_site import site

__all__ = ["site"]
