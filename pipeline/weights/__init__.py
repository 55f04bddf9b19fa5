"""Published weights: one directory with a manifest per version (versions), and the registry in Redis (registry).

    trainer: checkpoint durable ─▶ write to temp ─▶ rename ─▶ register (numbers only rise, one digest per number)
    worker:  latest ─▶ verify(digest, names, shapes, dtypes) ─▶ load ─▶ probe score

agreement: when two passes of one model over the same tokens agree; used by every model proof.
"""
