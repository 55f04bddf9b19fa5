"""What a run is doing, and what it waits for.

    heartbeat (each process, once a second) ─▶ snapshot ─▶ inspection ─▶ stalls, stages, verdict
                                                                                    └─▶ descriptions, report

Data first, text last: programs can read every module except the views, and no program reads a view.

| module       | noun                                                                         |
|--------------|------------------------------------------------------------------------------|
| heartbeat    | a process's row: alive, working or waiting, and for what                     |
| snapshot     | counts, versions and processes, read in one round trip                       |
| inspection   | a snapshot with queue, leases, streams and stalls; whether a run moves: the  |
|              | verdict of `sluice status --why`                                             |
| stalls       | what blocks a run                                                            |
| stages       | each stage of the flow: its contents, what blocks it; rates over time        |
| descriptions | view: stalls, stages, verdict and condition as text                          |
| report       | view: `sluice status` and `--why` as text and as JSON                        |
| text         | view: numbers and durations as text                                          |
"""
