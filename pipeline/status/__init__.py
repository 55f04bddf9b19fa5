"""What a run does, and what it waits for.

    heartbeat (each process, once a second) ─▶ snapshot ─▶ inspection ─▶ stalls, stages, diagnosis ─▶ report, text
                                                                                   rates ◀── snapshots over time

| module     | noun                                                                         |
|------------|------------------------------------------------------------------------------|
| heartbeat  | a process's row: alive, at work or waiting, and for what                      |
| snapshot   | counts, versions and processes, read in one round trip                       |
| inspection | a snapshot with queue, leases, streams and stalls                            |
| stalls     | what keeps a run                                                             |
| stages     | each stage of the flow: what is in it, how fast it goes, what it waits for   |
| rates      | how fast a run goes, from snapshots over time                                |
| diagnosis  | whether a run moves: the verdict of `sluice status --why`                    |
| report     | `sluice status` as text                                                      |
| text       | lengths, counts and conditions in words                                      |
"""
