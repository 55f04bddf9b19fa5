"""What a run has finished, kept on disk for people and for exports; never a source of truth.

    Consumer ─▶ Recorder ─▶ consumer-<partition>.sqlite ─┐
                                                         ├─▶ HistoryReader ─▶ dashboard, export, audit
    Trainer ──▶ TrainedRecorder ─▶ trainer.sqlite ───────┘

- `records`: what readers see: SequenceRow, SequenceDetail, JobRow, Trained.
- `files`: where the files are, their schema, how one is opened.
- `recorder`: what the consumer and the trainer call, and the one writer of a file; a failure never stops a role.
- `reader`: all files of a run as one.
"""
