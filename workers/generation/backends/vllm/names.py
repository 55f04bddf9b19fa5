"""Names that both sides of the process border use."""

EXTRA = "sluice"
"""Our key in `SamplingParams.extra_args`."""

OWNER = "SLUICE_VLLM_OWNER"
"""Environment variable for the core: "process id of the owner:folder of its log".

Not an engine argument: those name vLLM's cache of compiled models, which would be a new one at every start.
"""
