"""The Hugging Face backend: a decode loop of our own over `model.forward`.

```
 decode() ──▶ inbox ──▶ DecodeThread ──▶ Decoder.join: prefill newcomers (left-padded) ──▶ DecodeCache
    ▲                       │                Decoder.step: forward ─▶ Sampler ─▶ Row.push ──┐
    └──── SequenceOutput ◀──┴──────────────── rows that ended are compacted away ◀──────────┘
```
"""

from workers.generation.backends.hf.backend import HfBackend

__all__ = ["HfBackend"]
