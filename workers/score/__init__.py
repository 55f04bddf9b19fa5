"""The scorer: logprobs of finished sequences under a retained weight version.

score:jobs ──▶ Scorer (scorer.py) ──▶ VersionedModel (versioned.py) ──▶ answers to the trainer
                  │                       ▲
                  └── WeightsRegistry ────┘  one module in memory, whose weights follow the jobs
"""
