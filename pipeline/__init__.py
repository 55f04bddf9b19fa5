"""The kernel that every Sluice process shares. It imports no torch, transformers or vllm.

config ─▶ (every process)            keys ─▶ every name in Redis
producers ──enqueue──▶ jobs (lua/) ──claim──▶ workers ──commit──▶ streams.results
streams.results ──▶ consumers ──hand-off──▶ streams.batches ──▶ trainer ──publish──▶ weights ──▶ workers
supervise starts the processes, lifecycle ends them, status and progress show them
"""

__version__ = "0.1.0"
