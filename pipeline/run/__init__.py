"""How a run and its processes start, live and end.

    preflight, dry_run ─▶ stack ─▶ supervisor ─▶ one role process each

| module         | noun                                                                       |
|----------------|----------------------------------------------------------------------------|
| role           | a role process: connect, agree on the contract, heartbeat, signals, exit;  |
|                | one GPU for each, by a lock of the host                                    |
| imports        | torch and transformers, without what they take along                       |
| supervisor     | starts child processes, restarts those that fail, ends them in order        |
| stack          | `sluice up` and `run`: broker, every role, progress, to the run's end       |
| progress_panel | the live panel of `sluice up`                                              |
| preflight      | start-up checks; `sluice doctor`                                           |
| dry_run        | `--dry-run`: everything a start would do, and where, without doing it      |
| env            | `sluice env`: the facts for a bug report                                   |
| provenance     | the resolved configuration, every version and the origin, stored in a run  |
"""
