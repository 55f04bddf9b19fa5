"""The subtree from a stock server's environment: read whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.config.types import RepeatTerminateConfig
from sluice.pipeline.errors import ConfigError
from sluice.workers.guard.rules import JSON, JSON_PATH, SWITCH, from_environment, subtree

TREE: dict[str, Any] = {
    "enabled": True,
    "min_new_tokens": 7,
    "max_consecutive_token_repeats": 5,
    "ngram_size": 6,
    "ngram_repeats": 4,
    "any_period": True,
    "max_object_keys": 9,
    "object_key_prefix": '"box_',
}
PREFIXES = ("COORDEXP_", "SLUICE_")
OTHER = {**TREE, "min_new_tokens": 8}


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    """Either name of a variable."""
    return request.param


def file(directory: Path, tree: object) -> str:
    path = directory / "subtree.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return str(path)


def test_the_text_is_read_whole_under_either_name(prefix: str) -> None:
    assert from_environment({prefix + SWITCH: "1", prefix + JSON: json.dumps(TREE)}) == RepeatTerminateConfig(**TREE)


def test_the_file_is_read_whole_under_either_name(prefix: str, tmp_path: Path) -> None:
    environ = {prefix + SWITCH: "1", prefix + JSON_PATH: file(tmp_path, TREE)}
    assert from_environment(environ) == RepeatTerminateConfig(**TREE)


@pytest.mark.parametrize("path_prefix", PREFIXES)
def test_the_path_wins_over_the_text_whatever_their_prefixes(prefix: str, path_prefix: str, tmp_path: Path) -> None:
    environ = {prefix + SWITCH: "on", prefix + JSON: json.dumps(OTHER), path_prefix + JSON_PATH: file(tmp_path, TREE)}
    assert from_environment(environ) == RepeatTerminateConfig(**TREE)


@pytest.mark.parametrize(
    ("name", "one", "two"), [(SWITCH, "1", "0"), (JSON, json.dumps(TREE), json.dumps(OTHER)), (JSON_PATH, "/a", "/b")]
)
def test_both_names_with_different_values_are_refused(name: str, one: str, two: str) -> None:
    base = {"COORDEXP_" + SWITCH: "1", "COORDEXP_" + JSON: json.dumps(TREE)}
    with pytest.raises(ConfigError, match=rf"COORDEXP_{name} and SLUICE_{name} are both given and differ"):
        from_environment({**base, "COORDEXP_" + name: one, "SLUICE_" + name: two})


def test_both_names_with_the_same_value_are_one(tmp_path: Path) -> None:
    given = {SWITCH: "1", JSON: json.dumps(OTHER), JSON_PATH: file(tmp_path, TREE)}
    environ = {prefix + name: value for prefix in PREFIXES for name, value in given.items()}
    assert from_environment(environ) == RepeatTerminateConfig(**TREE)


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "TRUE", " On "])
def test_the_switch_is_on(value: str) -> None:
    assert from_environment({"COORDEXP_" + SWITCH: value, "COORDEXP_" + JSON: json.dumps(TREE)}) is not None


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "OFF"])
def test_switched_off_reads_nothing_else(value: str | None) -> None:
    switch = {} if value is None else {"COORDEXP_" + SWITCH: value}
    assert from_environment({**switch, "COORDEXP_" + JSON: "{not json", "SLUICE_" + JSON_PATH: "/none"}) is None


def test_another_switch_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"COORDEXP_{SWITCH} is 'maybe'; use one of 1, true"):
        from_environment({"SLUICE_" + SWITCH: "maybe", "SLUICE_" + JSON: json.dumps(TREE)})


def test_on_and_not_enabled_is_off() -> None:
    assert from_environment({"SLUICE_" + SWITCH: "1", "SLUICE_" + JSON: json.dumps({**TREE, "enabled": False})}) is None


@pytest.mark.parametrize("rest", [{}, {"COORDEXP_" + JSON: ""}, {"SLUICE_" + JSON_PATH: ""}])
def test_on_without_the_subtree_is_refused(rest: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"subtree is missing; give it as JSON in COORDEXP_{JSON}, .*{JSON_PATH}"):
        from_environment({"COORDEXP_" + SWITCH: "1", **rest})


@pytest.mark.parametrize("text", ["{", "enabled: true", '{"enabled": true,}'])
def test_text_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"COORDEXP_{JSON}: not JSON"):
        from_environment({"COORDEXP_" + SWITCH: "1", "COORDEXP_" + JSON: text})
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.json: not JSON"):
        from_environment({"COORDEXP_" + SWITCH: "1", "COORDEXP_" + JSON_PATH: str(path)})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    not_text = tmp_path / "latin.json"
    not_text.write_bytes(b'{"object_key_prefix": "\xe9"}')
    for path in (tmp_path / "missing.json", tmp_path, not_text):
        with pytest.raises(ConfigError, match=rf"{path}: cannot be read"):
            from_environment({"COORDEXP_" + SWITCH: "1", "COORDEXP_" + JSON_PATH: str(path)})


@pytest.mark.parametrize("key", sorted(TREE))
def test_a_misspelt_key_is_named_with_the_nearest(key: str) -> None:
    wrong = key[:-1] + "_"
    with pytest.raises(ConfigError, match=rf"here\.json: unknown key repeat_terminate\.{wrong}; .*{key}"):
        subtree({**TREE, wrong: TREE[key]}, "here.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in sorted(TREE) for value in ("1", 1, 1.5, True, None, [1], {}) if value != TREE[key]],
)
def test_a_value_of_the_wrong_type_is_named(key: str, value: object) -> None:
    right = {"enabled": bool, "any_period": bool, "object_key_prefix": str}.get(key, int)
    nullable = key in {"max_consecutive_token_repeats", "ngram_size", "max_object_keys"}
    if type(value) is right or (value is None and nullable):
        periods = {"any_period": False} if key in {"ngram_size", "ngram_repeats"} else {}  # it needs both
        assert getattr(subtree({**TREE, **periods, key: value}, "here.json"), key) == value
        return
    with pytest.raises(ConfigError, match=rf"here\.json: repeat_terminate\.{key}: Expected"):
        subtree({**TREE, key: value}, "here.json")


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens must be >= 0"),
        ({"max_object_keys": 0}, "max_object_keys must be >= 1"),
        ({"object_key_prefix": ""}, "object_key_prefix is empty"),
        ({"object_key_prefix": "\ud800"}, "object_key_prefix .* surrogate"),
        ({"ngram_size": 0}, "any_period looks at the last .* set ngram_size >= 1"),
        ({"ngram_size": None}, "any_period looks at the last"),
        ({"ngram_repeats": 1}, "any_period looks at the last .* ngram_repeats >= 2"),
        (
            {"max_consecutive_token_repeats": 0, "ngram_size": 0, "any_period": False, "max_object_keys": None},
            "every rule is off",
        ),
    ],
)
def test_thresholds_that_no_guard_can_have_are_refused(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=rf"here\.json: repeat_terminate\..*{names}"):
        subtree({**TREE, **changed}, "here.json")


@pytest.mark.parametrize("tree", [None, [], [TREE], "on", 3, True])
def test_a_subtree_that_is_no_mapping_is_refused(tree: object) -> None:
    with pytest.raises(ConfigError, match=r"here\.json: repeat_terminate must be a mapping"):
        subtree(tree, "here.json")
