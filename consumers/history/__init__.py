"""What a run has finished, kept on disk to be looked at and exported; never a source of truth.

    Consumer ─▶ Recorder ─▶ consumer-<partition>.sqlite ─┐
                                                         ├─▶ HistoryReader ─▶ dashboard, exports
    Trainer ──▶ TrainedRecorder ─▶ trainer.sqlite ───────┘

| module   | noun                                                              |
|----------|-------------------------------------------------------------------|
| records  | what readers see: SequenceRow, SequenceDetail, JobRow, Trained    |
| files    | where the files are, their schema, how one is opened              |
| store    | the one writer of a file                                          |
| recorder | what the consumer and the trainer call; a failure stops nobody    |
| opened   | the files as a reader has them open                               |
| queries  | a filter as SQL, a page's cursor                                  |
| reader   | HistoryReader: all files of a run as one                          |
"""
