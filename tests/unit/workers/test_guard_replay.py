"""`sluice guard replay`: other thresholds over rows that were decoded, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.pipeline.cli import main as cli
from sluice.pipeline.errors import ConfigError, DataError, ModelError
from sluice.workers.guard.replay import Replay, make_trials, replay
from sluice.workers.offline.answers import Answer, write_in_order
from tests.tiny_models import build_tokenizer

LOOP = [1, 2, 3, 4, *[5, 6] * 8]  # 20 tokens; an ngram of 2 blocks of 4 is there after 12
HEALTHY = [*range(10, 18), 0]
RULES = ("min_new_tokens=0", "ngram_size=4", "max_consecutive_token_repeats=3")


def answer(row: int, token_ids: list[int], reason: Any, **more: Any) -> Answer:
    return Answer(id=f"q{row}", row=row, finish_reason=reason, token_ids=token_ids, **more)


ROWS = [
    answer(0, LOOP, "length"),
    answer(1, HEALTHY, "stop"),
    answer(2, [7, 9, 9, 9, 8, 0], "stop"),  # three equal tokens, and it ends by itself
    Answer(row=3, finish_reason="error", error="too long"),
]


def saved(path: Path, rows: list[Answer]) -> Path:
    write_in_order(path, (row.line("all") for row in rows))
    return path


def outcome(tmp_path: Path, rows: list[Answer], *overrides: str) -> Replay:
    return replay(saved(tmp_path / "a.jsonl", rows), make_trials(None, overrides))


def cut(at_token: int, tokens: list[int]) -> Answer:
    triggers = {"repeat_terminate": 1, "active": 1, "rule": "ngram", "at_token": at_token}
    return answer(9, [*tokens[:at_token], 0], "repeat_terminated", triggers=triggers)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_it_counts_by_ending_and_by_rule_and_names_the_healthy_ones(tmp_path: Path, suffix: str) -> None:
    found = replay(saved(tmp_path / f"a.{suffix}", ROWS), make_trials(None, RULES))
    [trial] = found.trials
    length, stop, total = trial.of("length"), trial.of("stop"), trial.total()
    assert (length.rows, length.cut, length.tokens, length.tokens_saved) == (1, 1, 20, 8)
    assert (stop.rows, stop.cut, stop.tokens, stop.tokens_saved) == (2, 1, 15, 2)
    assert (total.rows, total.cut, total.tokens, total.tokens_saved) == (3, 2, 35, 10)
    assert dict(trial.by_rule) == {"ngram": 1, "consecutive": 1}
    assert [(one.id, one.rule, one.at_token, one.num_tokens) for one in trial.healthy] == [("q2", "consecutive", 4, 6)]
    assert [(one.id, one.rule, one.at_token) for one in trial.others] == [("q0", "ngram", 12)]
    assert found.errors == 1


@pytest.mark.parametrize(("count", "cuts"), [(11, 0), (12, 0), (13, 1)])
def test_a_trigger_on_the_last_token_is_no_cut(tmp_path: Path, count: int, cuts: int) -> None:
    [trial] = outcome(tmp_path, [answer(0, LOOP[:count], "length")], *RULES).trials
    assert trial.total().cut == cuts


def test_rows_that_a_guard_had_cut_count_apart(tmp_path: Path) -> None:
    rows = [cut(12, LOOP), cut(16, LOOP), answer(0, LOOP, "length")]
    [same] = outcome(tmp_path, rows, *RULES).trials
    before = same.of("repeat_terminated")
    assert (before.rows, before.cut, before.tokens, before.tokens_saved) == (2, 2, 28, 4)
    assert (same.total().rows, same.total().tokens_saved) == (1, 8)
    [later] = outcome(tmp_path, rows, *RULES, "min_new_tokens=14").trials
    assert (later.of("repeat_terminated").cut, later.of("repeat_terminated").tokens_saved) == (1, 2)


def test_object_keys_are_counted_by_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tokens = tokenizer.encode('{"object_1": 1, "object_2": 2, "object_3": 3}', add_special_tokens=False)
    path = saved(tmp_path / "a.jsonl", [answer(0, tokens, "length")])
    counted = ("min_new_tokens=0", "max_object_keys=2")
    [trial] = replay(path, make_trials(None, counted, model=str(tmp_path / "model"))).trials
    assert dict(trial.by_rule) == {"object_keys": 1}
    assert trial.others[0].at_token < len(tokens)
    with pytest.raises(ConfigError, match="--model DIR"):
        make_trials(None, counted)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        make_trials(None, counted, model=str(tmp_path))


def test_periods_that_do_not_divide_the_block_are_compared(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jsonl", [answer(0, [5, 6, 7] * 8, "length"), answer(1, LOOP, "length")])
    off, on = replay(path, make_trials(None, RULES, ["any_period=false,true"])).trials
    assert (off.name, on.name) == ("any_period=false", "any_period=true")
    assert (dict(off.by_rule), dict(on.by_rule)) == ({"ngram": 1}, {"any_period": 1, "ngram": 1})
    assert on.others[0].at_token == 16
    with pytest.raises(ConfigError, match="any_period looks at the last"):
        make_trials(None, ["ngram_size=0"], ["any_period=true"])


def test_thresholds_come_from_the_file_and_single_keys_win(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("custom: {extra: {rollout_matching: {repeat_terminate: {ngram_size: 8, ngram_repeats: 3}}}}")
    [plain] = make_trials(config)
    assert (plain.rules.config.ngram_size, plain.rules.config.ngram_repeats, plain.rules.config.enabled) == (8, 3, True)
    [changed] = make_trials(config, ["rollout_matching.repeat_terminate.ngram_size=4", "min_new_tokens=1"])
    assert (changed.rules.config.ngram_size, changed.rules.config.min_new_tokens) == (4, 1)
    varied = make_trials(config, [], ["ngram_size=4, 5", "max_consecutive_token_repeats=null,7"])
    assert [trial.name for trial in varied] == [
        f"ngram_size={size}, max_consecutive_token_repeats={run}" for size in (4, 5) for run in ("null", 7)
    ]


@pytest.mark.parametrize(
    ("overrides", "vary", "words"),
    [
        (["ngram_sze=4"], [], "--set ngram_sze=4: unknown key repeat_terminate.ngram_sze; did you mean 'ngram_size'"),
        (["ngram_size=x"], [], "repeat_terminate.ngram_size"),
        (["ngram_size"], [], "write it as --set key=value"),
        (["trainer.learning_rate=1"], [], "unknown key"),
        (["ngram_size=0", "max_consecutive_token_repeats=null"], [], "every rule is off"),
        ([], ["ngram_size"], "write it as --vary"),
        ([], ["ngram_size=1,x"], "repeat_terminate.ngram_size"),
        ([], [f"ngram_size={','.join(map(str, range(1, 66)))}"], "65 combinations"),
    ],
)
def test_thresholds_that_cannot_be_say_why(overrides: list[str], vary: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trials(None, overrides, vary)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "malformed row"),
        ('{"finish_reason": "stop", "text": "a"}', "--fields all"),
        ('{"finish_reason": "stop", "token_ids": [-1]}', r"token_ids\[0\]"),
        ('{"finish_reason": "repeat_terminated", "token_ids": [1, 2]}', "triggers.at_token is None"),
        ('{"finish_reason": "over", "token_ids": [1]}', "finish_reason"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = saved(tmp_path / "a.jsonl", ROWS[:1])
    path.write_text(path.read_text() + f"{line}\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{words}.*1 more"):
        replay(path, make_trials(None, RULES))
    found = replay(path, make_trials(None, RULES), skip_malformed=True)
    assert [row.where.rpartition(":")[2] for row in found.malformed] == ["2", "3"]
    assert found.trials[0].total().rows == 1


def test_the_command_says_it_in_text_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(tmp_path / "a.jsonl", [*ROWS, cut(12, LOOP)]))
    chosen = [part for rule in RULES for part in ("--set", rule)]

    def said(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["guard", "replay", *arguments])
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    code, out, _ = said(path, *chosen)
    assert code == 0
    for words in ("length", "rules: consecutive 1, ngram 1", "1 rows were cut by a guard already", "1 of 2",
                  "q2 (row 2), index 0: consecutive after 4 of 6 tokens", "1 rows ended in an error"):  # fmt: skip
        assert words in out
    code, out, _ = said(path, *chosen, "--vary", "ngram_size=4,64")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["ngram_size=4", "ngram_size=64"]
    found = json.loads(said(path, *chosen, "--json")[1])
    assert found["trials"][0]["total"] == {"rows": 3, "cut": 2, "tokens": 35, "tokens_saved": 10}
    assert (found["trials"][0]["healthy_cut"], found["trials"][0]["share"]) == (1, round(10 / 35, 4))
    assert said(str(tmp_path / "nosuch.jsonl"))[0] == DataError.exit_code
    assert said(path, "--set", "x=1")[0] == ConfigError.exit_code
