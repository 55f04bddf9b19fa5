"""What a run has finished, kept on disk to be looked at and exported; never a source of truth.

    Consumer ─▶ Recorder ─▶ consumer-<partition>.sqlite ─┐
                                                         ├─▶ HistoryReader ─▶ dashboard, export, audit
    Trainer ──▶ TrainedRecorder ─▶ trainer.sqlite ───────┘

- `records`: what readers see: SequenceRow, SequenceDetail, JobRow, Trained.
- `files`: where the files are, their schema, how one is opened.
- `recorder`: what the consumer and the trainer call, and the one writer of a file; a failure stops nobody.
- `reader`: all files of a run as one.
"""
