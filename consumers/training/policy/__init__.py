"""The policy loss over a packed batch, and the logprobs that it needs.

    surrogate ─▶ losses of tokens ─┐
    dpo ───────▶ loss of pairs     ├─▶ loss: weights against staleness, mismatch, KL, entropy, the mean
    proximal, reference: scores ───┘

`proximal` says which tokens need a logprob under the version after the one that sampled them, and fills it in;
`reference` does it for the frozen version of the KL term.
"""
