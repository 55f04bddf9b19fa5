"""Text ↔ tokens from a directory, against the tokenizers library itself."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sluice.consumers.tasks.codec import HFTextCodec, coord_token, normalized
from sluice.pipeline.errors import ModelError
from tests.detection_rollouts import tokens_anyhow
from tests.merged_tokenizers import family_codec
from tests.tiny_tokenizer import TURN_END, save_tiny_tokenizer, tiny_codec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(path)
    return path


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_text_survives_and_ends_are_those_of_complete_characters(text: str, seed: int) -> None:
    codec = tiny_codec("bytes")
    for ids in (codec.encode(text), tokens_anyhow(codec, text, seed)):
        assert codec.decode(ids) == text
        ends = codec.char_ends(ids)
        assert ends == sorted(ends)
        assert [*ends, 0][len(ids) - 1 if ids else 0] == len(text)
        for at in range(len(ids)):
            assert codec.decode(ids[: at + 1]).rstrip("\ufffd") == text[: ends[at]].rstrip("\ufffd")


@given(st.lists(st.integers(0, 700), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    codec = tiny_codec()
    library: Tokenizer = codec._tokenizer
    assert codec.decode(ids) == library.decode(ids, skip_special_tokens=False)
    ends = codec.char_ends(ids)
    assert len(ends) == len(ids)
    assert not ids or ends[-1] == len(codec.decode(ids))


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    codec = tiny_codec("bytes")
    ids = codec.encode("a🙃b")
    assert len(ids) == 6
    assert codec.char_ends(ids) == [1, 1, 1, 1, 2, 3]


def test_ends_cost_linear_time() -> None:
    codec = tiny_codec("bytes")
    ids = codec.encode("x🙂" * 40_000)
    assert codec.char_ends(ids)[-1] == 80_000, "each decoded anew, they would take hours"


def test_terminators_and_specials(folder: Path, tmp_path: Path) -> None:
    codec = HFTextCodec(folder)
    assert codec.encode(TURN_END) == list(codec.eos_token_ids)
    assert codec.coord_token_ids == ()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, codec.eos_token_ids[0]]}))
    assert HFTextCodec(tmp_path).eos_token_ids == (codec.eos_token_ids[0], 0)


def test_all_coordinate_tokens_or_none(tmp_path: Path) -> None:
    codec = tiny_codec("coords")
    assert codec.encode("<|coord_0|><|coord_999|>") == [codec.coord_token_ids[0], codec.coord_token_ids[999]]
    save_tiny_tokenizer(tmp_path, coord_tokens=True)
    text = (tmp_path / "tokenizer.json").read_text().replace("<|coord_500|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"999 of 1000.*coord_500"):
        HFTextCodec(tmp_path)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such directory; set model\.path"):
        HFTextCodec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        HFTextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        HFTextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="eos_token_id"):
        HFTextCodec(tmp_path)


def test_a_sentencepiece_like_vocabulary(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "</s>", *byte_pieces], vocab_size=400, show_progress=False)
    core.train_from_iterator(["a big dog saw a small dog"] * 5, trainer)
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    codec = HFTextCodec(tmp_path)
    ids = codec.encode("a big 🙂 dog")
    assert codec.decode(ids) == "a big 🙂 dog"
    ends = codec.char_ends(ids)
    assert ends == sorted(ends)
    assert ends[-1] == len("a big 🙂 dog")
    assert codec.decode(ids[: ends.index(7) + 1]) == "a big 🙂"


ANSWER = '{"object_1": {"desc": "a big  dog", "bbox_2d": [12, 40, 480, 400]}}'


@pytest.mark.parametrize("family", ["llama_like", "unigram", "qwen_like", "whole_lines"])
def test_a_continuation_has_no_space_before_it(family: str) -> None:
    codec = family_codec(family)
    for at in range(1, len(ANSWER)):
        ids = codec.encode(ANSWER[:at]) + codec.encode_continuation(ANSWER[at:])
        assert codec.decode(ids) == ANSWER


def test_a_continuation_has_no_space_behind_a_special_token() -> None:
    codec = family_codec("llama_like", coord_tokens=True)
    coords = ", ".join(map(coord_token, (12, 40, 480, 400)))
    assert codec.decode(codec.encode_continuation(f"[{coords}]}}")) == f"[{coords}]}}"


def test_a_continuation_of_bytes_has_no_space_before_it(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    codec = HFTextCodec(tmp_path)
    assert codec.decode(codec.encode("seven")) == " seven"
    assert codec.encode_continuation("seven") == tiny_codec().encode("seven")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\u2581\ufffd"), max_size=40))
@settings(max_examples=150, deadline=None)
def test_ends_of_pieces_are_those_of_complete_characters(text: str) -> None:
    codec = family_codec("llama_like")
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    spelled, ends = b"", []
    for piece in (codec._tokenizer.id_to_token(token) or "" for token in ids):
        is_byte = len(piece) == 6 and piece.startswith("<0x")
        spelled += bytes.fromhex(piece[3:5]) if is_byte else piece.replace("\u2581", " ").encode()
        ends.append(len(spelled[1:].decode("utf-8", "ignore")))
    assert codec.char_ends(ids) == ends


def test_a_character_belongs_to_the_byte_that_completes_it_behind_an_empty_token() -> None:
    codec = family_codec("llama_like")
    ids = codec.encode("🙂 dog")
    assert codec.char_ends(ids)[:5] == [0, 0, 0, 0, 1], "the space before the text, and four bytes"


@pytest.mark.parametrize("text", ["cafe\u0301 cre\u0300me", " \u212b ", "\u0301"])
def test_a_text_is_written_in_the_unicode_form_of_the_tokenizer(text: str) -> None:
    assert normalized(family_codec("qwen_like"), text) == unicodedata.normalize("NFC", text)
    assert normalized(tiny_codec(), text) == text, "it has no normalizer"


@pytest.mark.parametrize("text", ["  a b ", "\u0645", "a\u2581b", "say <|box|> now"])
@pytest.mark.parametrize("family", ["llama_like", "unigram", "wordpiece"])
def test_nothing_but_the_unicode_form_of_a_text_is_changed(family: str, text: str) -> None:
    assert normalized(family_codec(family), text) == text
