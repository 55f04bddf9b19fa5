"""Published weights: a directory a version with its manifest (versions), and what is registered in Redis (registry).

    trainer: checkpoint durable ─▶ write aside ─▶ rename ─▶ register (numbers only rise, one digest per number)
    worker:  latest ─▶ verify(digest, names, shapes, dtypes) ─▶ load ─▶ probe score

agreement: when two passes of one model over the same tokens agree, which every proof of a model asks.
"""
