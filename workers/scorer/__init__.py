"""The scorer: logprobs of finished sequences under a retained weight version.

score:jobs ──▶ Scorer (scorer.py) ──▶ VersionedModel (model.py) ──▶ answers to the trainer
                  │                       ▲
                  └── WeightsRegistry ────┘  one module in memory; its weights follow the jobs
"""
