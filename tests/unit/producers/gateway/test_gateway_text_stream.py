"""Text as it is shown piece by piece: all of it is the final text, and no piece shows what must not be seen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipeline.prompts.detokenizer import TextDecoder
from sluice.producers.gateway.parsers import Hermes
from sluice.producers.gateway.text_stream import TextStream
from tests.tiny_models import build_tokenizer, sentence_pieces

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


TOKENIZERS: dict[str, Any] = {"byte-level": build_tokenizer(), "byte fallback": sentence_pieces(strip=True)}
TOKENIZERS["byte fallback"].add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


def final_text(kind: str, token_ids: list[int], stop: list[str], *, strip: bool = True) -> str:
    """As the worker makes it."""
    text = TextDecoder(TOKENIZERS[kind])(token_ids)
    text = text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]
    return text.strip() if strip else text


def shown(
    kind: str, token_ids: list[int], cuts: list[int], stop: list[str], marker: str | None, *, strip: bool = True
) -> tuple[str, str]:
    """All pieces but the last, and the whole, of ids that come cut as given."""
    stream = TextStream(TextDecoder(TOKENIZERS[kind]), stop, marker, strip=strip)
    places = [0, *sorted({min(cut, len(token_ids)) for cut in cuts}), len(token_ids)]
    pieces = [stream.push(token_ids[a:b]) for a, b in itertools.pairwise(places)]
    return "".join(pieces), "".join(pieces) + stream.finish(final_text(kind, token_ids, stop, strip=strip))


def token_lists(kind: str) -> st.SearchStrategy[list[int]]:
    tokenizer = TOKENIZERS[kind]
    return st.one_of(
        st.lists(st.integers(0, len(tokenizer) - 1), max_size=40),  # broken bytes and special tokens among them
        st.lists(st.sampled_from(PIECES), max_size=12).map(
            lambda pieces: tokenizer.encode("".join(pieces), add_special_tokens=False)
        ),
    )


stops = st.lists(st.sampled_from(["stop", "st", "x\n", "東"]), max_size=2)
cuts_of = st.lists(st.integers(0, 60), max_size=8)


@every_kind
@given(st.data(), cuts_of, stops, st.booleans())
def test_any_split_gives_the_final_text_and_no_stop_string(
    kind: str, data: st.DataObject, cuts: list[int], stop: list[str], strip: bool
) -> None:
    ids = data.draw(token_lists(kind))
    early, whole = shown(kind, ids, cuts, stop, None, strip=strip)
    assert whole == final_text(kind, ids, stop, strip=strip)
    assert not any(end in early for end in stop)


@every_kind
@given(st.data(), cuts_of)
def test_nothing_of_a_tool_call_is_shown(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    ids = data.draw(token_lists(kind))
    early, whole = shown(kind, ids, cuts, [], MARKER)
    text = TextDecoder(TOKENIZERS[kind])(ids)
    assert whole == final_text(kind, ids, [])
    before = text[: text.find(MARKER)] if MARKER in text else text
    assert before.strip().startswith(early)
    assert Hermes()(final_text(kind, ids, [])).content.startswith(early), "what is missing of it can follow"


@every_kind
@given(st.data(), cuts_of)
def test_a_parser_without_a_marker_shows_all_at_the_end(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    ids = data.draw(token_lists(kind))
    assert shown(kind, ids, cuts, [], "") == ("", final_text(kind, ids, []))


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [("byte-level", [*"hello", " w", "o", "r", "東"]), ("byte fallback", ["a", "ab"])],
)
def test_text_is_shown_as_soon_as_it_is_certain(kind: str, pieces: list[str]) -> None:
    text = {"byte-level": "hello wor東 st", "byte fallback": "aab東"}[kind]
    stream = TextStream(TextDecoder(TOKENIZERS[kind]), ["stop"])
    found = [stream.push([token]) for token in TOKENIZERS[kind].encode(text, add_special_tokens=False)]
    assert [piece for piece in found if piece] == pieces
    assert "".join(found) + stream.finish(text) == text


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=6),
    st.lists(st.text("abcd", max_size=4), max_size=12),
)
def test_as_much_is_shown_as_no_stop_string_can_change(stop: list[str], pieces: list[str]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    stream, shown, text = TextStream(TextDecoder(tokenizer), stop, strip=False), "", ""
    for piece in pieces:
        shown += stream.push(tokenizer.encode(piece, add_special_tokens=False))
        if any(end in text for end in stop):
            continue
        text += piece
        places = [at for end in stop if (at := text.find(end)) >= 0]
        starts = [at for at in range(len(text)) for end in stop if end.startswith(text[at:])]
        assert shown == text[: min([*places, *starts], default=len(text))]


@every_kind
def test_a_token_costs_the_same_at_any_place(kind: str) -> None:
    sizes: list[int] = []

    class Counted(TextDecoder):
        def __call__(self, token_ids: Any, /) -> str:
            sizes.append(len(token_ids))
            return super().__call__(token_ids)

    tokenizer = TOKENIZERS[kind]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stream = TextStream(Counted(tokenizer))
    for token in [*tokenizer.encode("ab a b " * 100, add_special_tokens=False), *[end] * 100]:
        stream.push([token])
    assert max(sizes) <= 4
