"""A run's finished sequences, on disk for people and exports; never a source of truth.

    Consumer ─▶ Recorder ─▶ consumer-<partition>.sqlite ─┐
                                                         ├─▶ HistoryReader ─▶ dashboard, export, audit
    Trainer ──▶ TrainedRecorder ─▶ trainer.sqlite ───────┘         └─▶ HistoryIndex ─▶ RunCurves ─▶ dashboard

- `records`: the types that readers get: SequenceRow, SequenceDetail, JobRow, Trained.
- `files`: paths, schema, opening.
- `recorder`: called by the consumer and the trainer; the only writer of a file; a failure never stops a role.
- `reader`: all files of a run as one.
- `index`: texts, rewards, lengths and prompts, to search, sort and compare by; made by the dashboard, lazily, as
  `indexing` reads the other files.
- `curves`: reward, loss, held-out scores and the like over steps and time.
"""
