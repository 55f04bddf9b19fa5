"""The full pipeline from scratch: tiny models that learn to read digits, to add step by step, and to call tools."""

if not __name__.startswith("sluice."):
    raise ImportError(f"{__name__} is imported as sluice.{__name__}; write `sluice.` before it")
