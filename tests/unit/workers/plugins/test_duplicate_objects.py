"""Exactly the tokens that would complete a repeated object are forbidden, against a slow oracle over the vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sluice.consumers.tasks.codec import coord_token
from sluice.pipeline.errors import EngineError
from sluice.workers.engine.plugins.base import check_plugins
from sluice.workers.engine.plugins.json_objects import ClosingTokens, DuplicateObjectSuppression
from tests.unit.workers.plugins.repeats import num_repeats
from tests.unit.workers.plugins.vocabularies import KINDS, grown, spell, tokenizer_of

LEAVES = st.one_of(st.integers(0, 30), st.booleans(), st.text(st.sampled_from('{}"\\ a東'), max_size=3))
OBJECTS = st.dictionaries(
    st.sampled_from(["", "a", "b c"]), st.one_of(LEAVES, st.lists(LEAVES, max_size=2)), max_size=2
)
DRAWN = {
    "odd": '{ { { } } } , , [ ] " " \\ : 1 1 a {},{} },{} },{"a":1} }} }] "} 1},{"a": Ġ} Ċ} }Ġ]x \\"} ],{} [{" Ġ'
    ' ±"} }æĿ ±æ Ŀ±"},{} æ Ŀ ±',
    "plain": '{ { } } , [ ] " \\ : 1 a ab Ġ æ Ŀ ±',
}
"""Token pieces that a random walk draws from; those written twice are likelier."""


def forbidden(scores: torch.Tensor) -> set[int]:
    return set(torch.isneginf(scores[0]).nonzero().flatten().tolist())


def processor_of(kind: str, plugin: DuplicateObjectSuppression | None = None, prompt_len: int = 0) -> Any:
    (processor,) = (plugin or DuplicateObjectSuppression()).logits_processors(prompt_len, tokenizer_of(kind))
    return processor


def held_back(kind: str, tokens: list[int], plugin: DuplicateObjectSuppression | None = None) -> list[int]:
    """Which of the tokens were forbidden when their turn came."""
    zeros, prompt = torch.zeros(1, len(tokenizer_of(kind))), [0]
    processor = processor_of(kind, plugin, prompt_len=1)
    contexts = [torch.tensor([prompt]), *grown(prompt, tokens)]
    return [
        at for at, token in enumerate(tokens) if bool(torch.isneginf(processor(contexts[at], zeros.clone())[0, token]))
    ]


def encode(kind: str, text: str, seed: int = 0) -> list[int]:
    return [token for token, _ in spell(kind, text, random.Random(seed))]


def text_of(kind: str, tokens: Iterable[int]) -> str:
    return tokenizer_of(kind).decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DRAWN)), st.integers(0, 2**32))
def test_a_random_sampler_never_repeats_an_object(kind: str, seed: int) -> None:
    """At each step what is forbidden is what the oracle says of text + token, for every token."""
    drawn, plugin = random.Random(seed), DuplicateObjectSuppression()
    pieces = [*drawn.sample(DRAWN[kind].split(), 12), "{", "}", "}"]
    choice = [tokenizer_of(kind).convert_tokens_to_ids(piece) for piece in pieces]
    processor = processor_of(kind, plugin)
    tokens = [tokenizer_of(kind).convert_tokens_to_ids(piece) for piece in drawn.choice(("[", "[{", "{"))]
    for _ in range(25):
        scores = torch.full((1, len(tokenizer_of(kind))), float("-inf"))
        scores[0, choice] = 0.0
        before = scores.clone()
        left = processor(torch.tensor([tokens]), scores)
        assert torch.equal(scores, before)
        text = text_of(kind, tokens)
        repeating = {one for one in choice if num_repeats(text_of(kind, [*tokens, one])) > num_repeats(text)}
        allowed = set(choice) - forbidden(left)
        assert allowed == (set(choice) - repeating or set(choice))
        tokens.append(drawn.choice([one for one in choice if one in allowed]))
    assert num_repeats(text_of(kind, tokens)) == 0 or plugin.num_given_up


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.lists(OBJECTS, min_size=2, max_size=5), st.booleans(), st.integers(0, 9))
def test_objects_that_differ_are_never_held_back(
    kind: str, objects: list[dict[str, Any]], keyed: bool, seed: int
) -> None:
    value = {f"object_{at}": one for at, one in enumerate(objects)} if keyed else objects
    text = json.dumps(value, ensure_ascii=False, indent=random.Random(seed).choice((None, 1)))
    assume(num_repeats(text) == 0)
    assert held_back(kind, encode(kind, text, seed)) == []


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), OBJECTS, OBJECTS, st.booleans(), st.integers(0, 9))
def test_a_repeated_object_is_held_back_at_its_closing_brace(
    kind: str, one: dict[str, Any], other: dict[str, Any], keyed: bool, seed: int
) -> None:
    """However its white space, and whatever stands between it and the first."""
    assume(one != other)
    first, second = (json.dumps(one, ensure_ascii=False, indent=indent) for indent in (None, 1))
    between = json.dumps(other, ensure_ascii=False)
    opening = f'{{"x": {first}, "y": {between}, "z": {second}' if keyed else f"[{first}, {between}, {second}"
    spelled = spell(kind, opening + ("}" if keyed else "]"), random.Random(seed))
    closing = next(at for at, (_, size) in enumerate(spelled) if size >= len(opening.encode()))
    assert held_back(kind, [token for token, _ in spelled]) == [closing]


@pytest.mark.parametrize(
    ("text", "num_held_back"),
    [
        ('[{"a": 1}, {"a": 2}, {"a": 1.0}, {"a": "1"}, {"a": 01}, {"a": 1 1}, {"a": 11}]', 0),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', 0),
        ('[{"a": "x y"}, {"a": "xy"}, {"a": "x  y"}, {"a": "A"}, {"a": "\\u0041"}]', 0),
        ('[{"a": {"b": 1}}, {"c": {"b": 1}}]', 0),  # equal, but in different objects
        ('{"p": [{"a": 1}], "q": [{"a": 1}]}', 0),
        ('{"a": 1} {"a": 1} [{"a": 1}]', 0),  # top-level values
        ('[["a"], ["a"], [1], [1]]', 0),  # arrays
        ('[{"a": "{}"}, {"a": "{} {}"}]', 0),
        ('[{"a": {"b": 1}}, {"a": {"b": 1}}]', 1),
        ('[{"a":1},\n { "a" :\t1 }, {"a":1\n}]', 2),
        ("[{}, {}, { }] [{}, {}]", 3),
        ('x {"p": {"a": [1, {"b": 2}]}, "q": {"a":[1,{"b":2}]}}', 1),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "words"])
def test_what_counts_as_equal(kind: str, text: str, num_held_back: int) -> None:
    """A forbidden token is fed all the same, so that what follows is still judged."""
    assert len(held_back(kind, encode(kind, text))) == num_held_back == num_repeats(text)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["plain", "words"]), st.text(st.sampled_from('}],:"\\a 1東'), max_size=15))
def test_text_without_an_open_value_is_untouched(kind: str, text: str) -> None:
    processor = processor_of(kind)
    scores = torch.zeros(1, len(tokenizer_of(kind)))
    for ids in grown([], tokenizer_of(kind).encode(text)):
        assert processor(ids, scores) is scores


def test_the_prompt_never_counts() -> None:
    tokenizer = tokenizer_of("plain")
    prompt, tokens = tokenizer.encode('[{"a": 1}, '), tokenizer.encode('[{"a": 1')
    processor = processor_of("plain", prompt_len=len(prompt))
    assert not forbidden(processor(torch.tensor([[*prompt, *tokens]]), torch.zeros(1, len(tokenizer))))


def test_of_the_whole_vocabulary_only_what_repeats_is_forbidden() -> None:
    tokenizer = tokenizer_of("odd")
    tokens = tokenizer.encode('[{"a":1},{"a":1')
    gone = forbidden(processor_of("odd")(torch.tensor([tokens]), torch.zeros(1, len(tokenizer))))
    assert gone == {one for one in range(len(tokenizer)) if num_repeats(text_of("odd", [*tokens, one]))}
    names = {tokenizer.convert_ids_to_tokens(one) for one in gone}
    assert names >= {"}", "}}", "}]", "Ġ}", "Ċ}", "}æĿ", "},{}", "{},{}"}
    assert not names & {"1", ",", '"', "Ġ", '"}', "{}", "<|im_end|>"}


def test_special_tokens_are_told_apart() -> None:
    tokenizer = tokenizer_of("coords")

    def item(coord: int) -> list[int]:
        ids = [tokenizer.convert_tokens_to_ids(coord_token(coord))]
        return [*tokenizer.encode('{"b": '), *ids, *tokenizer.encode("}")]

    comma = tokenizer.encode(",")
    first = [*tokenizer.encode("["), *item(7), *comma]
    assert held_back("coords", [*first, *item(8)]) == []
    again = [*first, *item(8), *comma, *item(7)]
    assert held_back("coords", again) == [len(again) - 1]


def test_scores_stay_where_nothing_else_is_left() -> None:
    tokenizer, plugin = tokenizer_of("plain"), DuplicateObjectSuppression()
    ids = torch.tensor([tokenizer.encode("[{},{")])
    scores = torch.full((1, len(tokenizer)), float("-inf"))
    scores[0, tokenizer.convert_tokens_to_ids("}")] = 1.0
    processor = processor_of("plain", plugin)
    assert torch.equal(processor(ids, scores), scores)
    assert plugin.num_given_up == 1
    scores[0, 0] = 0.0
    assert forbidden(processor(ids, scores)) >= {tokenizer.convert_tokens_to_ids("}")}
    assert plugin.num_given_up == 1


def test_max_objects_forgets_the_oldest() -> None:
    tokens = encode("plain", "[{1},{2},{3},{1},{3}]")
    ends = [at for at, token in enumerate(tokens) if token == tokenizer_of("plain").convert_tokens_to_ids("}")]
    assert held_back("plain", tokens) == ends[3:]
    assert held_back("plain", tokens, DuplicateObjectSuppression(max_objects=2)) == ends[4:]
    with pytest.raises(EngineError, match="max_objects=0"):
        DuplicateObjectSuppression(max_objects=0)


def test_a_model_with_more_logits_than_tokens_and_the_reverse() -> None:
    tokenizer = tokenizer_of("plain")
    ids, brace = torch.tensor([tokenizer.encode("[{},{")]), tokenizer.convert_tokens_to_ids("}")
    assert brace in forbidden(processor_of("plain")(ids, torch.zeros(1, len(tokenizer) + 50)))
    assert not forbidden(processor_of("plain")(ids, torch.zeros(1, brace)))


def test_the_vocabulary_is_read_once_and_few_texts_are_tried() -> None:
    closing = ClosingTokens.of(tokenizer_of("odd"))
    assert ClosingTokens.of(tokenizer_of("odd")) is closing
    assert set(closing.ends["}"]) == {"}", " }", "\n}"}
    assert len(closing.ends["}"]["}"]) >= 8  # of one text, tried once
    assert set(closing.repeats) == {"{},{}", "},{}", '},{"a":1}'}
    decoded = {tokenizer_of("odd").decode([token]) for token in closing.unclear}
    assert '\ufffd"}' in decoded
    assert all("\ufffd" in text for text in decoded)


def test_it_is_refused_where_its_hook_is_not_called() -> None:
    with pytest.raises(EngineError, match="duplicate_objects"):
        check_plugins([DuplicateObjectSuppression()], backend="vllm", hooks=frozenset(), request_type="text")
    plugin = DuplicateObjectSuppression()
    check_plugins([plugin], backend="hf", hooks=plugin.hooks, request_type="vlm")


@pytest.mark.parametrize(("earlier", "repeats"), [("1 1", True), ("11", False)])
def test_white_space_before_a_token_parts_two_numbers(earlier: str, repeats: bool) -> None:
    tokens = encode("odd", f'[{{"a":{earlier}}},{{"a":1 ')
    gone = forbidden(processor_of("odd")(torch.tensor([tokens]), torch.zeros(1, len(tokenizer_of("odd")))))
    assert (tokenizer_of("odd").convert_tokens_to_ids("1}") in gone) is repeats
