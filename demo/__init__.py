"""The full pipeline from scratch: tiny models that learn to read digits, to add step by step, and to call tools."""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
