"""Configuration: precedence, unknown keys, rules, YAML traps."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.pipeline.config import Config, load_config, resolved_yaml
from sluice.pipeline.config.load import UNASKED, parse_yaml, read_config
from sluice.pipeline.config.redaction import hide_password
from sluice.pipeline.errors import ConfigError
from tests.deadlines import HANG_S

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert load_config(path, environ={}).run


def test_precedence_is_set_over_environment_over_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "run_dir: from-yaml\nmodel: {path: from-yaml}\nrun: from-yaml\n")
    environ = {"SLUICE_RUN_DIR": "from-env", "SLUICE_MODEL": "from-env"}
    config = load_config(path, ["model.path=from-set"], environ)
    assert (config.run, config.run_dir, config.model.path) == ("from-yaml", "from-env", "from-set")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {learning_rat: 1}", ["c.yaml", "trainer.learning_rat", "'learning_rate'"]),
        ("worker:\n  leese_s: 3", ["worker.leese_s", "'lease_s'"]),
        ("rollout_matching: {repeat_terminate: {min_tokens: 3}}", ["repeat_terminate.min_tokens", "min_new_tokens"]),
        ("rollout_matching: {repeat_terminate: 3}", ["repeat_terminate", "must be a mapping"]),
        ("zzz: 1", ["unknown key zzz", "valid keys"]),
        ("worker: {count: many}", ["worker.count", "int"]),
        ("worker: {lease_s: 2, renew_s: 1.5}", ["worker.renew_s", "half of worker.lease_s"]),
        ("run: 'a b'", ["run 'a b'"]),
        ("producer: {samples_per_version: 8, max_in_flight: 4}", ["max_in_flight", "raise it"]),
        ("producer: {samples_per_version: 9, group_size: 2}", ["multiple of", "group_size"]),
        ("weights: {retention: 2}", ["weights.retention", "max_staleness + 2"]),
        ("sampling: {temperature: -1}", ["temperature must be >= 0"]),
        ("sampling: {logprobs: false}", ["sampling.logprobs must be true", "gateway"]),
        ("sampling: {temprature: 1}", ["sampling.temprature", "'temperature'"]),
        ("rollout_matching: {repeat_terminate: {min_new_tokens: -1}}", ["repeat_terminate.min_new_tokens", ">= 0"]),
        ("rollout_matching: {repeat_terminate: {max_object_keys: 0}}", ["repeat_terminate.max_object_keys", "null"]),
        (
            "rollout_matching: {repeat_terminate: {max_object_keys: 1, object_key_prefix: ''}}",
            ["repeat_terminate.object_key_prefix", "empty"],
        ),
        (
            "rollout_matching: {repeat_terminate: {enabled: true, ngram_size: 0, max_consecutive_token_repeats: null}}",
            ["repeat_terminate.enabled", "every rule is off"],
        ),
        (
            "rollout_matching: {repeat_terminate: {}}\ncustom: {extra: {rollout_matching: {repeat_terminate: {}}}}",
            ["rollout_matching and custom.extra.rollout_matching are both given"],
        ),
        ("run: a\nrun: b", ["twice", "line 2"]),
        ("worker: [1, 2", ["not valid YAML: line 1, column 14: expected ',' or ']'"]),
        ("worker:\n\tcount: 1", ["line 2, column 1: found character '\\t'", "indent with spaces"]),
        ("- a\n- b", ["top level must be a mapping"]),
        ("worker:", ["worker must be a mapping"]),
    ],
)
def test_a_bad_file_is_refused_with_place_and_remedy(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environ={})
    for word in words:
        assert word in str(caught.value)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = """\
wroker: {}
trainer: {learning_rat: 1, warmup_steps: many}
images: {roots: [a, 1]}
rollout_matching: {repeat_terminate: {min_tokens: 3}, fp_cost: cheap}
shared: &x {leese_s: 3}
worker: *x
"""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), ["worker.cuont=3", "nonsense"], {"SLUICE_METRICS_PORT": "x"})
    head, *lines = str(caught.value).splitlines()
    assert (head, len(lines), lines[-1]) == ("11 problems", 12, UNASKED)
    for word in ("METRICS_PORT", "--set worker.cuont=3", "--set 'nonsense'", "'worker'", "'learning_rate'",
                 "trainer.warmup_steps: Expected `int`, got `str`", "images.roots[1]", "repeat_terminate.min_tokens",
                 "rollout_matching.fp_cost", "unknown key shared", "unknown key worker.leese_s"):  # fmt: skip
        assert any(word in line for line in lines), word


def test_every_broken_rule_and_every_duplicate_is_said_at_once(tmp_path: Path) -> None:
    text = "data: {epochs: 0}\nhistory: {max_mb: 0}\nrollout_matching: {repeat_terminate: {min_new_tokens: -1}}"
    with pytest.raises(ConfigError, match="3 problems") as caught:
        load_config(write(tmp_path, text), environ={})
    for key in ("data.epochs", "history.max_mb", "repeat_terminate.min_new_tokens"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match="2 problems") as caught:
        load_config(write(tmp_path, "run: a\nrun: b\nworker: {count: 1, count: 2}"), environ={})
    assert "'run' is given twice (line 2)" in str(caught.value)
    assert "'count' is given twice (line 3)" in str(caught.value)


def test_sections_may_share_keys_by_a_merge(tmp_path: Path) -> None:
    """The shared mapping merges another one, and is merged before it is read itself."""
    text = "producer: &p {<<: &q {poll_s: 0.3}, group_size: 2}\nconsumer: {<<: *q, poll_s: 0.4}\nworker: {<<: *q}\n"
    config = load_config(write(tmp_path, text), environ={})
    assert (config.producer.poll_s, config.producer.group_size) == (0.3, 2)
    assert (config.consumer.poll_s, config.worker.poll_s) == (0.4, 0.3)
    with pytest.raises(ConfigError, match="'count' is given twice"):
        load_config(write(tmp_path, "worker: {<<: {poll_s: 1}, count: 1, count: 2}"), environ={})


def test_numbers_without_a_dot_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "trainer: {learning_rate: 1e-3}"), ["trainer.weight_decay=5e-2"], {})
    assert (config.trainer.learning_rate, config.trainer.weight_decay) == (1e-3, 5e-2)


def test_custom_extra_is_an_accepted_place_but_not_both(tmp_path: Path) -> None:
    inner = "custom: {extra: {rollout_matching: {fp_cost: 2.5}}}"
    assert load_config(write(tmp_path, inner), environ={}).rollout_matching.fp_cost == 2.5
    with pytest.raises(ConfigError, match="both given"):
        load_config(write(tmp_path, inner + "\nrollout_matching: {fn_cost: 2}"), environ={})


@pytest.mark.parametrize("item", ["worker.cuont=3", "nonsense", "worker.count.more=1"])
def test_a_bad_override_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(None, [item], {})


@pytest.mark.parametrize("given", ["text", "text.yaml", "configs/text.yaml", "configs/text"])
def test_installed_configurations_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    assert load_config(given, environ={}).run == "text"
    write(tmp_path, "run: mine").rename(tmp_path / "detection.yaml")
    assert load_config("detection.yaml", environ={}).run == "mine", "one's own file comes first"
    with pytest.raises(ConfigError, match="did you mean 'detection'"):
        load_config("detecton", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(f"elsewhere/{given}", environ={})


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "b.yaml")


def test_the_resolved_file_loads_again_and_keeps_no_password(tmp_path: Path) -> None:
    config = load_config(None, ["broker.url=redis://:secret@h:1/0", "worker.count=3"], {})
    text = resolved_yaml(config)
    assert "secret" not in text
    again = load_config(write(tmp_path, text), environ={})
    assert (again.worker.count, again.broker.url) == (3, None)


@pytest.mark.parametrize("seconds", ["-1", "1e7", ".inf", ".nan"])
def test_a_scan_of_the_rows_has_an_end(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"preflight\.max_s must be in 0\.\.1000000"):
        load_config(None, [f"preflight.max_s={seconds}"], {})


EMPTY = load_config(None, [], {})


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12),
        st.from_regex(r"[-+]?[0-9_]{0,3}\.?[0-9]{0,3}([eE][-+]?[0-9]{1,3})?", fullmatch=True),
        st.sampled_from(
            ["3e-5", "1234e567", "12e3", "1e5", ".5e3", "null", "yes", "0x1", "1:30", "2024-01-01", "~", "<<"]
        ),
    )
)
def test_any_text_is_the_same_in_the_resolved_file(text: str) -> None:
    config = replace(EMPTY, model=replace(EMPTY.model, path=text), custom={text: [text]})
    again = parse_yaml(resolved_yaml(config), "it")
    assert (again["model"]["path"], again["custom"]) == (text, {text: [text]})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:secret@h:1/0?db=2", "redis://:***@h:1/0?db=2"),
        ("redis://h/0?password=se@cret&db=2", "redis://h/0?password=***&db=2"),
        ("redis://u:a@h/0?pass%77ord=secret", "redis://:***@h/0?pass%77ord=***"),
        ("redis://:sec?ret@h/0?password=secret", "redis://:***@h/0?password=***"),
        ("rediss://h/0?ssl_keyfile=/k&ssl_password=secret", "rediss://h/0?ssl_keyfile=/k&ssl_password=***"),
        ("u:secret@h:1", ":***@h:1"),
        ("http://h:9000/?token=secret", "http://h:9000/?token=***"),
    ],
)
def test_no_secret_of_an_address_is_shown_or_stored(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    text = resolved_yaml(load_config(None, [f"broker.url={url}", f"rollout.url={url}"], {}))
    assert "secret" not in text
    assert "***@" not in text
    stored = yaml.safe_load(text)
    assert stored["broker"]["url"] == (url if url == shown else None)
    assert stored["rollout"]["url"] == shown.replace(":***@", "")


def test_a_typo_on_the_command_line_ends_with_exit_code_2(tmp_path: Path) -> None:
    path = write(tmp_path, "wroker: {}")
    command = [sys.executable, "-m", "sluice.pipeline.cli.main", "config", "check", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 2
    assert "did you mean 'worker'" in ended.stdout


def test_any_key_may_be_set_below_a_free_mapping(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run: a"), ["worker.vllm.extra.max_num_seqs=16", "custom.mine.deep=1"])
    assert config.worker.vllm.extra == {"max_num_seqs": 16}
    assert config.custom == {"mine": {"deep": 1}}


BOMBS = {
    "aliases": "custom:\n  a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"  {b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefgh")),
    "merges": "custom:\n  a: &a {x: [1, 2]}\n"
    + "".join(f"  {b}: &{b} {{p: *{a}, q: *{a}, r: *{a}, s: *{a}}}\n" for a, b in pairwise("abcdefghijklmno")),
    "an alias within itself": "custom: {a: &a [*a]}",
    "deep": "custom: {a: " + "[" * 300 + "]" * 300 + "}",
    "deeper": "custom: {a: " + "[" * 20_000 + "]" * 20_000 + "}",
    "deep by aliases": "custom:\n  a: &a [x]\n"
    + "".join(
        f"  {b}: &{b} [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[*{a}]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]\n"
        for a, b in pairwise("abcdefghi")
    ),
    "long": "custom: {a: '" + "x" * (1 << 20) + "'}",
    "a lone surrogate": 'custom: {a: "\\ud800"}',
    "beyond 64 bits": "seed: " + "9" * 20,
    "far beyond": "worker: {lease_s: " + "9" * 400 + "}",
    "no consumer": "consumer: {count: 0}",
    "no group": "producer: {group_size: 0}",
    "fewer than none": "consumer: {count: -3}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_whatever_a_file_holds_it_is_a_named_error_at_once(tmp_path: Path, name: str) -> None:
    """What they stand for is never built: that would take all memory, or hours."""
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(write(tmp_path, BOMBS[name]), environ={})


def test_a_few_aliases_are_welcome(tmp_path: Path) -> None:
    text = "custom: {a: &a {x: 1}, b: [*a, *a], c: *a}"
    config = load_config(write(tmp_path, text), environ={})
    assert config.custom == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}], "c": {"x": 1}}


@pytest.mark.parametrize("count", [0, -1, -(2**63)])
def test_no_partitions_are_a_named_error(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"consumer\.count must be > 0, got {count}"):
        load_config(None, [f"consumer.count={count}"], {})


def test_the_directory_of_a_run_is_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("run: mine\nseed: 7\n")
    config = load_config(tmp_path, ["seed=8"], {})
    assert (config.run, config.seed) == ("mine", 8)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "gone", [], {})
    (tmp_path / "config.resolved.yaml").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, [], {})


def test_a_misspelt_section_leaves_the_one_that_was_meant_unsure(tmp_path: Path) -> None:
    for path, overrides in ((None, ["modl.path=x"]), (write(tmp_path, "modl: {path: x}"), [])):
        found = read_config(path, overrides, {})
        [problem] = found.problems
        assert "unknown key modl; did you mean 'model'?" in problem
        assert "model" in found.unsure


def test_a_value_of_the_wrong_type_hides_no_rule_of_another_section(tmp_path: Path) -> None:
    found = read_config(None, ["worker.renew_s=abc", "worker.count=-1", "consumer.count=-1"], {})
    typed, ruled = found.problems
    assert typed.endswith("worker.renew_s: Expected `float`, got `str` ('abc')")
    assert "consumer.count must be > 0, got -1" in ruled
    assert {"worker", "consumer"} <= found.unsure
    assert len(read_config(write(tmp_path, "producer: 3"), ["data.epochs=0"], {}).problems) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("worker.backend=vlm", "worker.backend must be one of hf, vllm, got 'vlm'; did you mean 'vllm'?"),
        ("worker.fallback_backend=zzz", "worker.fallback_backend must be one of hf, got 'zzz'"),
        ("worker.backend=3", "worker.backend: Expected `str`, got `int` (3)"),
    ],
)
def test_a_word_that_is_none_of_a_few_is_answered_with_those(override: str, message: str) -> None:
    [problem] = read_config(None, [override], {}).problems
    assert problem.endswith(message)


def test_rules_between_keys_are_asked_unless_one_of_them_is_unsure() -> None:
    found = read_config(None, ["worker.renew_s=abc", "producer.max_in_flight=1"], {})
    assert [any(word in one for one in found.problems) for word in ("worker.renew_s:", "max_in_flight 1")] == [True] * 2
    for unsure in ("producer.max_staleness=abc", "producer.max_stalenes=3"):
        found = read_config(None, ["weights.retention=1", "trainer.minibatches=999", unsure], {})
        assert len(found.problems) == 2, "the default of max_staleness would be judged"
        assert "trainer.minibatches 999 is above" in found.problems[1]
        assert found.unasked
    with pytest.raises(ConfigError, match="rules that read these keys too are checked once this is fixed"):
        load_config(None, ["weights.retention=1", "producer.max_staleness=abc"], {})
    found = read_config(None, ["consumer.count=0", "weights.retention=1"], {})
    assert len(found.problems) == 2, "a rule that divides by the count is left out"
    assert not read_config(None, ["images.max_bm=3"], {}).unasked
    found = read_config(None, ["trainer.ranks=two", "eval.patience=3"], {})
    assert found.unasked, "what ranks leave out depends on it"
    assert "eval.patience does nothing" in found.problems[1], "evaluation doesn't"


# Negative ones mean something, or are off: seeds, a score's threshold, a vocabulary's ids, ranges of both signs, and
# thresholds of the guard.
ANY_NUMBER = {
    "seed", "sampling.seed", "sampling.top_k", "sampling.presence_penalty", "sampling.frequency_penalty",
    "sampling.allowed_token_ids", "sampling.stop_token_ids", "eval.pass_above",
    "rollout_matching.repeat_terminate.max_consecutive_token_repeats",
    "rollout_matching.repeat_terminate.ngram_size", "rollout_matching.repeat_terminate.ngram_repeats",
}  # fmt: skip
NO_LIMIT = {"broker.retry_for_s", "trainer.max_grad_norm", "policy.weight_cap"}


def numbers_of(section: type[msgspec.Struct], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each key that takes a number, or a list of them, and its type."""
    for name, annotation in get_type_hints(section).items():
        for one in get_args(annotation) if get_origin(annotation) in (UnionType, Union) else [annotation]:
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                yield from numbers_of(one, f"{above}{name}.")
            elif one in (int, float) or (get_origin(one) is tuple and {int, float} & {*get_args(one)}):
                yield f"{above}{name}", one


@pytest.mark.parametrize(("key", "kind"), list(numbers_of(Config)))
def test_a_number_that_means_nothing_is_refused(key: str, kind: Any) -> None:
    kinds = [one for one in get_args(kind) if one is not ...] or [kind]
    values = [] if key in ANY_NUMBER else [-1]
    if float in kinds:
        values += [math.nan] if key in NO_LIMIT else [math.nan, math.inf]
    for value in values:
        given = [value] * len(kinds) if get_args(kind) else value
        text = yaml.safe_dump(given, default_flow_style=True).partition("\n")[0]
        with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
            load_config(None, [f"{key}={text}"], {})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rollout_matching.match_top_k", "0", "must be > 0, got 0"),  # no prediction would match
        (
            "rollout_matching.max_text_chars",
            "0",
            "must be > 0, got 0",
        ),  # the truth would be trained in place of answers
        ("trainer.betas", "[1.5, 0.9]", "must be in 0..1, 1 excluded, got 1.5"),
        ("worker.vllm.gpu_memory_utilization", "7", "must be in 0..1, 0 excluded, got 7.0"),
        ("trainer.learning_rate", ".inf", "must be a finite number, got inf"),
    ],
)
def test_what_is_out_of_range_is_named_with_the_range(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key} {says}")):
        load_config(None, [f"{key}={value}"], {})


@pytest.mark.parametrize(
    ("given", "file", "says"),
    [
        (["broker=redis://:sekret@h"], "", "broker must be a mapping, got 'redis://:***@h'"),
        ([], "broker: redis://:sekret@h", "broker must be a mapping, got 'redis://:***@h'"),
        ([], "broker: [redis://:sekret@h]", "broker must be a mapping, got a list"),
        (["broker.urll=redis://:sekret@h"], "", "--set broker.urll=redis://:***@h: unknown key broker.urll"),
        (["redis://:sekret@h"], "", "--set 'redis://:***@h': write it as"),
        (["run.at=redis://:sekret@h"], "", "run has no keys below it"),
    ],
)
def test_an_address_in_a_wrong_place_shows_no_secret(tmp_path: Path, given: list[str], file: str, says: str) -> None:
    for environ in ({}, {"REDIS_URL": "redis://:sekret@h:1/0"}):
        with pytest.raises(ConfigError) as refused:
            load_config(write(tmp_path, file), given, environ)
        assert "sekret" not in str(refused.value)
        if not environ:
            assert says in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["tracing.enabled=true", "tracing.endpoint='http://[bad'"], "tracing.endpoint must be http://HOST:PORT"),
        (["weights.transport=store", "weights.store_url='s3://[bad'"], "must begin with s3://, gs:// or file://"),
        (["producer.group_size=65537"], "producer.group_size must be at most 65536, got 65537"),
        (["broker.sentinel_master=m", "broker.cluster=true"], "sentinel_master m and broker.cluster are both set"),
    ],
)
def test_what_no_process_could_work_with_is_refused_in_words(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(None, given, {})
    assert load_config(None, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1:4317"}).tracing.endpoint


def test_a_collector_that_others_use_is_no_matter_of_a_run_without_tracing() -> None:
    others = {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}
    assert not load_config(None, environ=others).tracing.enabled
    with pytest.raises(ConfigError, match=r"tracing\.endpoint must be http://HOST:PORT"):
        load_config(None, ["tracing.enabled=true"], others)


def test_a_rule_that_a_variable_breaks_names_the_variable(tmp_path: Path) -> None:
    broken = {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317", "SLUICE_METRICS_HOST": "0.0.0.0"}
    path = write(tmp_path, "tracing: {enabled: true, max_queue: 0}")
    found = read_config(path, environ=broken).problems
    assert [one.partition(": tracing.")[0] for one in found] == [
        "environment variable OTEL_EXPORTER_OTLP_ENDPOINT",
        str(path),
    ]
    (problem,) = read_config(None, ["tracing={enabled: true, endpoint: 'other:1'}"], broken).problems
    assert problem.startswith("defaults: tracing.endpoint"), "--set wins over the variable"
