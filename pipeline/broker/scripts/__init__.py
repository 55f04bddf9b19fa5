"""The Lua scripts that make each hop atomic, one file each, and their typed requests. Times come from Redis TIME.

    Claim(owner=…, lease_ms=…) ──▶ Scripts.ask(names, request) ──▶ claim.lua ──▶ ClaimAnswer(jobs=…, over=…)
             its fields are ARGV, in order ◀── library ──▶ names: KEYS, and the first part of ARGV

| module   | scripts                                                                                  |
|----------|------------------------------------------------------------------------------------------|
| library  | finding and calling a script, its answer; constants that Python and Lua share            |
| jobs     | the job queue: enqueue, claim, settle, commit, checkpoint, release, fail, renew, replay … |
| streams  | roles, the source, result and batch streams, weight versions, the run's contract         |
| rollouts | agent rollouts: open, add, publish, drop, sweep                                          |
| scores   | score jobs: put, take, renew, answer                                                     |

A script whose first line is `-- needs: a b` gets the shared functions of a.lua and b.lua prepended.
"""

from sluice.pipeline.broker.scripts.library import BlockingScripts, Scripts, source

__all__ = ["BlockingScripts", "Scripts", "source"]
