"""The reference pages of docs/: their tables are made from the types, whose comments are the text.

- A page is written by hand, but for what lies between the two marks; `sluice config reference` makes that part.
- `make check` compares, so a page cannot be stale.
"""

from pipeline.reference.pages import PAGES, check, table, write

__all__ = ["PAGES", "check", "table", "write"]
