"""Exports a run's sequences to files that other programs read.

    history ──┐
              ├─▶ read_run ─▶ Exported ─┬▶ full_row | sft_row ─▶ write ─▶ PATH
    rollouts ─┘                         └▶ ExportedImages ───────┘

- `run`: what is read, the rows, and what is left out, with the reason.
- `files`: columns and formats; written to a temporary path and renamed when complete.
- `texts`: for TRL also text, such as the best and the worst answer of a group.
- `images`: if any sequence has images, every row has a column `images`.
- `card`: the card of a data set for the Hub.
- `model`: a version's weights instead, with an adapter merged.
"""
