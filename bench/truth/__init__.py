"""`sluice bench truth`: is every number right, for every architecture of the matrix?

architectures ─▶ check ─┬─ decode on a backend, alone and in a batch that rows join and leave ─▶ against `generate`
                        └─ score in training rows ─▶ against plain passes                         and plain passes
"""
