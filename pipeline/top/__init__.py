"""`sluice top`: a run in a terminal of 80 × 24, over ssh.

    Feed.look (once a second) ──▶ View ──▶ parts (head, why, stages, processes, dead letters) ──▶ app | one frame

- A broker that goes away is said, with since when; what was seen last stays, and it goes on once the broker is back.
- It only reads.
"""
