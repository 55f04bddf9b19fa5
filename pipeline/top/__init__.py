"""`sluice top`: a run in a terminal of 80 × 24, over ssh.

    Feed.look (once a second) ──▶ View ──▶ panels (head, why, stages, processes, dead letters) ──▶ app | one frame

- If the broker goes away, it shows that, and since when; the last state stays, and updates resume once it is back.
- Read-only.
"""
