"""Text as it is shown piece by piece: all of it is the final text, and no piece shows what must not be seen."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sluice.producers.gateway.answers import TextStream
from sluice.producers.gateway.parsers import Hermes

MARKER = Hermes.marker
PIECES = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "a"}',
    "<to",
    "ol_c",
    "all>",
    "stop",
    "st",
    "op",
    " ",
    "\n",
    "é",
    "東",
    "🙂",
    "x",
)


@cache
def tokenizer() -> Any:
    """256 bytes, and a special token."""
    core = Tokenizer(models.BPE({char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.add_special_tokens(["<|end|>"])
    return core


def decode(token_ids: Any) -> str:
    return tokenizer().decode(list(token_ids), skip_special_tokens=True)


def final_text(token_ids: list[int], stop: list[str]) -> str:
    """As the worker makes it."""
    text = decode(token_ids)
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))].strip()


def shown(token_ids: list[int], cuts: list[int], stop: list[str], marker: str | None) -> tuple[str, str]:
    """All pieces but the last, and the whole, of ids that come cut as given."""
    stream = TextStream(decode, stop, marker)
    places = [0, *sorted({min(cut, len(token_ids)) for cut in cuts}), len(token_ids)]
    pieces = [stream.push(token_ids[a:b]) for a, b in itertools.pairwise(places)]
    return "".join(pieces), "".join(pieces) + stream.finish(final_text(token_ids, stop))


token_lists = st.one_of(
    st.lists(st.integers(0, 256), max_size=40),  # broken bytes and special tokens among them
    st.lists(st.sampled_from(PIECES), max_size=12).map(lambda pieces: tokenizer().encode("".join(pieces)).ids),
)
stops = st.lists(st.sampled_from(["stop", "st", "x\n", "東"]), max_size=2)
cuts_of = st.lists(st.integers(0, 60), max_size=8)


@given(token_lists, cuts_of, stops)
def test_any_split_gives_the_final_text_and_no_stop_string(ids: list[int], cuts: list[int], stop: list[str]) -> None:
    early, whole = shown(ids, cuts, stop, None)
    assert whole == final_text(ids, stop)
    assert not any(end in early for end in stop)


@given(token_lists, cuts_of)
def test_nothing_of_a_tool_call_is_shown(ids: list[int], cuts: list[int]) -> None:
    early, whole = shown(ids, cuts, [], MARKER)
    text = decode(ids)
    assert whole == final_text(ids, [])
    before = text[: text.find(MARKER)] if MARKER in text else text
    assert before.strip().startswith(early)
    assert Hermes()(final_text(ids, [])).content.startswith(early), "what is missing of it can follow"


@given(token_lists, cuts_of)
def test_a_parser_without_a_marker_shows_all_at_the_end(ids: list[int], cuts: list[int]) -> None:
    assert shown(ids, cuts, [], "") == ("", final_text(ids, []))


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    ids = tokenizer().encode("hello wor東 st").ids
    stream = TextStream(decode, ["stop"])
    pieces = [stream.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == [*"hello", " w", "o", "r", "東"]
    assert stream.finish("hello wor東 st") == " st"


def test_a_token_costs_the_same_at_any_place() -> None:
    sizes: list[int] = []

    def counted(token_ids: Any) -> str:
        sizes.append(len(token_ids))
        return decode(token_ids)

    stream = TextStream(counted)
    for token in tokenizer().encode("some words " * 100).ids:
        stream.push([token])
    assert max(sizes) <= 4
