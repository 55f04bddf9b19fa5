"""What a run does, and what it waits for.

    heartbeat (each process, once a second) ─▶ snapshot ─▶ inspection ─▶ stalls, stages, diagnosis
                                                   └─▶ rates (over time)           └─▶ descriptions, report

Data first, words last: everything left of the views can be read by a program, and nothing reads a view.

| module       | noun                                                                         |
|--------------|------------------------------------------------------------------------------|
| heartbeat    | a process's row: alive, at work or waiting, and for what                     |
| snapshot     | counts, versions and processes, read in one round trip                       |
| inspection   | a snapshot with queue, leases, streams and stalls                            |
| stalls       | what keeps a run                                                             |
| stages       | each stage of the flow: what is in it, how fast it goes, what keeps it       |
| rates        | how fast a run goes, from snapshots over time                                |
| diagnosis    | whether a run moves: the verdict of `sluice status --why`                    |
| descriptions | view: stalls, stages, verdict and condition in words                         |
| report       | view: `sluice status` and `--why` as text and as JSON                        |
| text         | view: numbers and lengths of time in words                                   |
"""
