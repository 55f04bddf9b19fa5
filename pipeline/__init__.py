"""The kernel that every Sluice process shares. It imports no torch, transformers or vllm.

config ─▶ (every process)            keys ─▶ every name in Redis
producers ──enqueue──▶ jobs (broker/scripts/) ──claim──▶ workers ──commit──▶ streams.results
streams.results ──▶ consumers ──hand-off──▶ streams.batches ──▶ trainer ──publish──▶ weights ──▶ workers
run starts, supervises and ends the processes; status and top show them
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
