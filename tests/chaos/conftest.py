"""Fixtures of this folder."""

from tests.e2e.fixtures import make_stack, model_dir

__all__ = ["make_stack", "model_dir"]
