"""The vLLM backend: an embedded `AsyncLLM` with its engine core in a separate process.

```
 caller's loop                engine thread (with its event loop)           core process (vLLM)
 decode() ──▶ EngineThread ──▶ Sequences.decode ─ RunningSequence.push ◀─ tokens ─ scheduler, model
    ▲                             │  gate: weight loads between sequences          SeededSampler: draws the tokens
    └────── SequenceOutput ◀──────┘                                                owner: ends with its owner
```

- Importing this package imports no vLLM; `start` does.
- Stop policy, random numbers and versions are ours: the same code as in the hf backend.
"""

from sluice.workers.engine.vllm.backend import VllmBackend

__all__ = ["VllmBackend"]
