"""A run's sequences as files that other programs read.

history ──┐
          ├──▶ Exported ──▶ row ──▶ writer ──▶ PATH
rollouts ─┘      (source.py)  (row.py)  (writers.py)
"""
