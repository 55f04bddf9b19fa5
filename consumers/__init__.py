"""What happens to a result after the worker: reward, group, pack, train, inspect.

    results ─▶ loop ─▶ groups ─▶ rewards ─▶ tasks (parse · match · target) ─▶ samples ─▶ pack ─▶ batches ─▶ training
                │                                                                                              │
                └──────────▶ history ◀─────────────────────────────────────────────────────────────────────────┘
                                └─▶ dashboard, export, audit

- `loop`: the consumer process; `groups`, `samples`, `pack`: the steps that are the same for every task.
- `rewards`: your own functions, which score sequences before the task's steps.
- `tasks`: the contract of a task, the built-in ones, and how a config replaces their steps.
- `training`: one session for every trainer, the built-in one, and `handoff` for your own training loop.
- `adapters`: trainers of other packages on the hand-off.
- `history`: finished sequences on disk; `dashboard`, `export` and `audit` read it.
"""

if not __name__.startswith("sluice."):
    raise ImportError(f"import {__name__} as sluice.{__name__}")
