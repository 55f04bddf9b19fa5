"""Truth labels on sampled tokens, with a codec whose token borders the test chooses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sluice.consumers.tasks.detection.target import Edit, Sampled, token_segments, truth_labels
from sluice.consumers.tasks.segments import Segment


class PiecesCodec:
    """Greedy longest match over a given vocabulary."""

    eos_token_ids: tuple[int, ...] = (0,)
    coord_token_ids: tuple[int, ...] = ()

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = max((piece for piece in self.pieces if text.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def char_ends(self, token_ids: Sequence[int]) -> list[int]:
        return [len(self.decode(token_ids[: at + 1])) for at in range(len(token_ids))]

    def ids(self, *pieces: str) -> list[int]:
        return [self.pieces.index(piece) for piece in pieces]


DIGITS = ("[", "]", ",", "1", "2", "3", "4", "5", "12", "]}", "5]}", "[1", "4,5")

CASES = [
    # sampled pieces, corrections, {position: label piece or None}
    pytest.param(["[", "1", "]"], [("1", "2")], {1: "2"}, id="same count"),
    pytest.param(["[", "1", "3", "]"], [("13", "24")], {1: "2", 2: "4"}, id="same count, all differ"),
    pytest.param(["[", "1", "3", "]"], [("13", "1")], {1: "1", 2: "]"}, id="truth shorter: it ends here"),
    pytest.param(["[", "1", "]"], [("1", "13")], {1: "1", 2: "3"}, id="truth longer: it goes on here"),
    pytest.param(["[", "3", "4", "5", "]"], [("345", "12")], {1: "12", 2: None, 3: None}, id="rest is off"),
    pytest.param(["[", "1", "2", "]"], [("12", "12")], {1: "12", 2: None}, id="same text, other tokens"),
    pytest.param(["[", "1", "3", "]"], [("13", "13")], {1: "1", 2: "3"}, id="right"),
    pytest.param(["[", "2", "5]}"], [("5", "4")], {2: "4"}, id="merged with what follows: shorter label"),
    pytest.param(["[", "2", "4", "]}"], [("4", "5")], {2: "5]}"}, id="the truth merges, the sample does not"),
    pytest.param(["[1", "]"], [("1", "2")], {0: "["}, id="merged with what precedes"),
    pytest.param(["[", "4,5", "]"], [("4", "1"), ("5", "2")], {1: "1"}, id="two values in one token"),
    pytest.param(["[", "4,5", "]"], [("4", "4"), ("5", "2")], {1: "4"}, id="the second of two is wrong"),
    pytest.param(["[", "4,5", "]"], [("4", "4"), ("5", "5")], {1: "4,5"}, id="two right values in one token"),
]


@pytest.mark.parametrize(("pieces", "corrections", "wanted"), CASES)
def test_alignment(pieces: list[str], corrections: list[tuple[str, str]], wanted: dict[int, str | None]) -> None:
    codec = PiecesCodec(*DIGITS)
    text, ids = "".join(pieces), codec.ids(*pieces)
    edits = [Edit((text.index(old), text.index(old) + len(old)), new) for old, new in corrections]
    labels = truth_labels(codec, Sampled(text, ids, codec.char_ends(ids)), edits)
    assert {at: None if label is None else codec.pieces[label] for at, label in labels.items()} == wanted


class TornCodec(PiecesCodec):
    """Pieces are bytes written as Latin-1, so that a token can end inside a character."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.encode().decode("latin-1"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).encode("latin-1").decode("utf-8", "replace")


def test_a_value_whose_first_character_is_torn_off_by_the_quote_is_off() -> None:
    codec = TornCodec('"', "e", "\xc3", "\xa9", '"\xc3')
    ids = codec.ids('"\xc3', "\xa9", '"')
    sampled = Sampled('"é"', ids, [1, 2, 3])
    assert truth_labels(codec, sampled, [Edit((1, 2), "e")]) == {1: None}


def test_a_torn_token_belongs_to_the_character_that_it_begins() -> None:
    structure, desc = Segment.matched_structure, Segment.false_positive
    assert token_segments([1, 1, 2, 3], [structure, desc, structure]) == [structure, desc, desc, structure]
