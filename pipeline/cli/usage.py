"""Wrong usage: one line on stderr that says what is wrong, what was probably meant, and whose --help says more."""

from __future__ import annotations

from difflib import get_close_matches

from cyclopts import CycloptsError, UnknownCommandError

_FEW = 8


def complaint(error: CycloptsError) -> str:
    """The line, without `error: `."""
    error.verbose = False
    chain = " ".join(("sluice", *(error.command_chain or ())))
    text = _unknown(error) if isinstance(error, UnknownCommandError) else str(error)
    return f"{' '.join(text.split())} See `{chain} --help`."


def _unknown(error: UnknownCommandError) -> str:
    """cyclopts' own sentence goes on with the first eight of all commands."""
    word = (error.unused_tokens or [""])[0]
    known = [name for name in error.app or () if not name.startswith("-")]
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    meant = near or [name for name in known if word and name.startswith(word)][:1]
    few = f" Commands: {', '.join(sorted(known))}." if len(known) <= _FEW else ""
    return f'Unknown command "{word}".' + (f' Did you mean "{meant[0]}"?' if meant else few)
