"""Published weights: one directory with a manifest per version (versions), brought to the workers by a carrier
(carriers), and the registry in Redis (registry). versions also says which are live, and which was published from which.

    trainer: write to temp ─▶ rename ─▶ register (a number keeps its digest forever; the newest may be an older one
             again, if a kill undid later steps)
    worker:  latest ─▶ verify(digest, names, shapes, dtypes) ─▶ load ─▶ probe score

adapter: a version that is a LoRA adapter, and how it changes its base.

shared_memory: copies of versions in a host's memory, each with an owner.

store: versions in an object store, whole or as deltas; object_store: its transfers; delta: the format; host_cache: the
versions that a host has fetched, and what it has verified, so that one of its processes hashes a version and not each.

agreement: when two passes of one model over the same tokens agree; used by every model proof.
"""
