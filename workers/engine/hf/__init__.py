"""The Hugging Face backend: our own decode loop over `model.forward`.

```
 decode() ──▶ inbox ──▶ DecodeThread ──▶ Decoder.join: prefill newcomers (left-padded) ──▶ DecodeCache
    ▲                       │                Decoder.step: forward ─▶ Sampler ─▶ Row.push ──┐
    └──── SequenceOutput ◀──┴──────────────── rows that ended are compacted away ◀──────────┘
```
With images, `PreparedImages` makes the inputs in separate threads before the request goes to the inbox; the prompt is
prefilled alone with what the vision tower made of them (`ImageFeatures`), and steps in the common batch.
"""

from sluice.workers.engine.hf.backend import HfBackend

__all__ = ["HfBackend"]
