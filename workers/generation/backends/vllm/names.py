"""Names that both sides of the process border use."""

EXTRA = "sluice"
"""Our key in `SamplingParams.extra_args` and in `additional_config`."""
