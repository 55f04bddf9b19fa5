"""`sluice bench`: what the pipeline costs, beside the bare engine or a peer, in one run."""

if not __name__.startswith("sluice."):
    raise ImportError(f"{__name__} is imported as sluice.{__name__}; write `sluice.` before it")
