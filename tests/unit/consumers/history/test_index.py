"""The index of a history: found by text, sorted, of one prompt, in step with what is written, pruned and replaced."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sluice.consumers.history.files import TRAINER
from sluice.consumers.history.index import LOCK, NAME, HistoryIndex, match_text
from sluice.consumers.history.indexing import k3
from sluice.consumers.history.recorder import Finished, FinishedJob, TrainedStore
from sluice.consumers.history.records import SequenceFilter, Trained
from sluice.pipeline.errors import DataError
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from tests.factories import sequence_result, training_sample
from tests.finished import row, store

WORDS = {5: "what", 6: "is", 7: "seven", 8: "times", 9: "eight"}


def decoder() -> Any:
    return lambda ids: " ".join(WORDS.get(one, "?") for one in ids)


def said(job_id: str, text: str, prompt: Sequence[int] = (5, 6), index: int = 0, **changes: Any) -> Finished:
    facts = {"version_min": 0, "version_max": 0, "new_tokens": len(text), **changes}
    result = sequence_result(job_id, index, text=text, prompt_token_ids=TokenArray(prompt), timings={"behind_s": 2.5})
    return Finished.of(row(job_id, index, **facts), result, None, None)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[HistoryIndex]:
    made = HistoryIndex(tmp_path, decoder)
    yield made
    made.close()


def names(index: HistoryIndex, text: str = "", **wanted: Any) -> list[str]:
    while index.catch_up(10):
        pass
    return [row.job_id for _, row in index.rows(index.find(SequenceFilter(), text, **wanted))]


def fill(directory: Path) -> None:
    writer = store(directory)
    for name, text, prompt, reward, version in (
        ("a", "the answer is 56", (7, 8, 9), 1.0, 0), ("b", "no idea", (7, 8, 9), 0.0, 3),
        ("c", "Fifty-six, naïvely", (5, 6), 0.5, 3), ("d", "a very long and wordy answer", (5, 6), None, 4),
    ):  # fmt: skip
        changes = {"reward": reward, "version_min": version, "version_max": version}
        writer.record([FinishedJob(job_id=name, sequences=[said(name, text, prompt, **changes)])])
    writer.close()


def test_sequences_are_found_by_words_of_answer_and_prompt(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    assert names(index, "answer") == ["d", "a"]
    assert names(index, "seven") == ["b", "a"], "in the prompt"
    assert names(index, "NAIVE") == ["c"], "a beginning, whatever its accents"
    assert names(index, "answer 56") == ["a"]
    assert names(index, '"is the"') == []
    assert names(index, '"answer is"') == ["a"]
    assert names(index, "56 OR idea") == [], "nothing of a query is an operator"


def test_they_are_sorted_and_bounded(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    assert names(index, sort="best") == ["a", "c", "b"]
    assert names(index, sort="worst") == ["b", "c", "a"]
    assert names(index, sort="longest")[0] == "d"
    assert names(index, sort="shortest")[0] == "b"
    assert names(index, ranges={"reward": (0.5, None)}) == ["c", "a"]
    assert names(index, ranges={"length": (None, 10)}) == ["b"]
    assert names(index, limit=1, skip=1) == ["c"]


def test_a_prompt_is_followed_over_versions(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    index.catch_up(10)
    entry = index.entry("b:0")
    assert entry is not None
    found, total = index.same_prompt(entry.prompt)
    assert ([row.job_id for _, row in index.rows(found)], total) == (["a", "b"], 2)
    assert [(version, reward) for version, _, reward in index.rewards(entry.prompt)] == [(0, 1.0), (3, 0.0)]
    assert index.prompt_text(entry.prompt) == "seven times eight"
    assert index.entry("nobody:0") is None


def test_what_is_written_later_is_indexed_next(tmp_path: Path, index: HistoryIndex) -> None:
    assert index.catch_up(10) == 0, "before there is a history"
    fill(tmp_path)
    assert len(names(index)) == 4
    writer = store(tmp_path)
    writer.record([FinishedJob(job_id="e", sequences=[said("e", "the newest answer")])])
    writer.close()
    assert names(index, "answer")[0] == "e"
    assert (tmp_path / NAME).exists()


def test_a_second_one_reads_what_the_first_wrote_and_takes_over(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    index.catch_up(10)
    second = HistoryIndex(tmp_path, decoder)
    assert names(second, "answer") == ["d", "a"]
    index.close()
    assert names(second, "idea") == ["b"]
    second.close()


def test_one_that_may_not_write_reads_what_another_wrote_and_takes_nothing_over(
    tmp_path: Path, index: HistoryIndex
) -> None:
    fill(tmp_path)
    assert names(index)
    reader = HistoryIndex(tmp_path, may_write=False)
    assert [one.version for one in reader.endings()] == [0, 3, 4]
    index.close()
    assert reader.endings()
    assert not reader.is_writer, "the run's own dashboard is to go on"
    reader.close()


@pytest.mark.parametrize("enqueued_at", [5.0, 6.0])
def test_a_job_that_was_done_again_is_found_by_what_it_gave_last(
    tmp_path: Path, index: HistoryIndex, enqueued_at: float
) -> None:
    """By a consumer's successor, perhaps from other tokens; or an agent used its id for another job."""

    def finish(text: str, version: int, **facts: Any) -> None:
        changes = {"version_min": version, "version_max": version, **facts}
        writer.record([FinishedJob(job_id="a", sequences=[said("a", text, (7, version), **changes)])])

    writer = store(tmp_path)
    writer.record([FinishedJob(job_id="b", sequences=[said("b", "alpha too")])])
    finish("alpha", 3, reward=0.0, enqueued_at=5.0)
    assert names(index, "alpha") == ["a", "b"]
    finish("beta", 7, reward=1.0, enqueued_at=enqueued_at, state="dropped")
    assert names(index, "alpha") == ["b"]
    assert names(index, "beta") == ["a"]
    assert names(index, ranges={"reward": (0.5, None)}) == ["a"]
    assert len(index.find(SequenceFilter(state="dropped"), sort="longest")) == 1
    assert [(one.version, one.counts) for one in index.endings()] == [(0, {"stop": 1}), (7, {"stop": 1})]
    stamp = index.stamp()
    finish("beta", 7, reward=1.0, enqueued_at=enqueued_at, state="dropped")
    names(index)
    assert index.stamp() == stamp, "the same again is not read again"
    writer.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as db:
        assert db.execute("select count(*) from answers").fetchone() == (2,)
        assert db.execute("select count(*) from prompts").fetchone() == (2,)


def test_what_was_pruned_is_gone_and_what_was_replaced_is_indexed_anew(tmp_path: Path, index: HistoryIndex) -> None:
    writer = store(tmp_path, max_sequences=4)
    for number in range(3):
        writer.record([FinishedJob(job_id=f"j{number}", sequences=[said(f"j{number}", f"text {number}")])])
    assert len(names(index, "text")) == 3
    for number in range(3, 9):
        writer.record([FinishedJob(job_id=f"j{number}", sequences=[said(f"j{number}", f"text {number}")])])
    writer.close()
    assert names(index, "text") == ["j8", "j7", "j6", "j5"]
    for path in tmp_path.glob("consumer-0*"):
        path.unlink()
    fill(tmp_path)
    assert "a" in names(index, "56")


def test_a_deleted_index_is_made_again(tmp_path: Path) -> None:
    """docs/concepts.md: `index.*` may be deleted while no dashboard runs."""
    fill(tmp_path)
    for _ in range(2):
        made = HistoryIndex(tmp_path, decoder)
        assert names(made, "answer") == ["d", "a"]
        made.close()
        deleted = [path.unlink() for path in tmp_path.glob("index.*")]
        assert len(deleted) >= 2, "the index and its lock"


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / NAME).write_bytes(b"not a database" * 100)
    made = HistoryIndex(tmp_path, decoder)
    assert names(made, "answer") == ["d", "a"]
    made.close()


def test_a_file_made_anew_between_two_dashboards_is_indexed_anew(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    assert len(names(index)) == 4
    index.close()
    [path] = tmp_path.glob("consumer-*.sqlite")
    inode = path.stat().st_ino
    for number in range(5):
        path.unlink()  # as the message about a damaged file advises
        writer = store(tmp_path)
        for name in ("x", "y", "z", "u", "v")[: number + 1]:
            writer.record([FinishedJob(job_id=name, sequences=[said(name, f"answer {number}", at=float(number))])])
        writer.close()
        if path.stat().st_ino != inode:
            pytest.skip("this file system gives a new file another inode")
        second = HistoryIndex(tmp_path, decoder)
        assert names(second, f'"answer {number}"') == ["v", "u", "z", "y", "x"][4 - number :]
        assert names(second, "idea") == []
        second.close()


def test_prompts_are_forgotten_with_their_last_answer(tmp_path: Path, index: HistoryIndex) -> None:
    writer = store(tmp_path, max_sequences=4)
    for number in range(12):
        prompt = (5, 6) if number % 2 else (7, 8, 9, *(5,) * number)
        writer.record([FinishedJob(job_id=f"j{number}", sequences=[said(f"j{number}", "text", prompt)])])
        index.catch_up(10)
    writer.close()
    assert names(index, "what") == ["j11", "j10", "j9", "j8"]
    db = sqlite3.connect(tmp_path / NAME)
    assert db.execute("select count(*) from prompts").fetchone() == (3,), "two long ones, and the common one"
    assert db.execute("select count(*) from prompt_texts").fetchone() == (3,)
    db.close()


def test_an_index_that_is_damaged_later_is_named_and_made_again(tmp_path: Path) -> None:
    writer = store(tmp_path)
    jobs = [f"j{number}" for number in range(200)]
    writer.record([FinishedJob(job_id=name, sequences=[said(name, f"answer {name} " * 20)]) for name in jobs])
    writer.close()
    made = HistoryIndex(tmp_path, decoder)
    assert len(names(made, limit=300)) == 200
    made.close()
    size = (tmp_path / NAME).stat().st_size
    with (tmp_path / NAME).open("r+b") as stream:  # its first page is whole, so it opens
        stream.seek(4096)
        stream.write(b"\xff" * (size - 4096))
    torn = HistoryIndex(tmp_path, decoder)
    with pytest.raises(DataError, match=NAME):
        names(torn, limit=300)
    assert len(names(torn, limit=300)) == 200
    torn.close()


def test_a_directory_that_takes_no_index_is_searched_all_the_same(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / LOCK).mkdir()
    made = HistoryIndex(tmp_path, decoder)
    assert names(made, "answer") == ["d", "a"]
    assert not (tmp_path / NAME).exists()
    made.close()


def test_without_a_tokenizer_answers_are_found_all_the_same(tmp_path: Path) -> None:
    def none() -> Any:
        raise DataError("no tokenizer")

    fill(tmp_path)
    made = HistoryIndex(tmp_path, none)
    assert names(made, "answer") == ["d", "a"]
    assert names(made, "seven") == []
    made.close()


@pytest.mark.parametrize("text", ["", "  ", "***", '"', '""'])
def test_a_search_without_a_word_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="no word"):
        match_text(text)


def test_endings_and_loads_are_counted_by_version(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    index.catch_up(10)
    assert [(one.version, one.counts) for one in index.endings()] == [
        (0, {"stop": 1}),
        (3, {"stop": 2}),
        (4, {"stop": 1}),
    ]
    assert index.loads() == {0: 2.5, 3: 2.5, 4: 2.5}


def test_durations_are_counted_once_and_anew_for_another_file(tmp_path: Path, index: HistoryIndex) -> None:
    def finish(name: str, queue_s: float, decode_s: float) -> None:
        writer = store(tmp_path)
        writer.record([FinishedJob(job_id=name, sequences=[said(name, "x", queue_s=queue_s, decode_s=decode_s)])])
        writer.close()

    finish("a", 0.01, 1.5)
    finish("b", 3.0, 1.0)
    finish("dead", 0.0, 0.0)
    assert len(names(index)) == 3
    assert index.durations() == {"waited": {0: 1, 5: 1}, "took": {4: 2}}
    finish("c", 3.0, 1.0)
    names(index)
    assert index.durations() == {"waited": {0: 1, 5: 2}, "took": {4: 3}}
    for path in tmp_path.glob("consumer-0*"):
        path.unlink()
    finish("d", 0.01, 0.01)
    names(index)
    assert index.durations() == {"waited": {0: 1}, "took": {0: 1}}


def test_a_number_that_is_none_stops_no_indexing(tmp_path: Path, index: HistoryIndex) -> None:
    result = sequence_result("a", text="odd", timings={"behind_s": math.nan}, reward=math.nan)
    writer = store(tmp_path)
    facts = row("a", version_min=0, version_max=0, reward=math.nan)
    writer.record([FinishedJob(job_id="a", sequences=[Finished.of(facts, result, None, None)])])
    writer.record([FinishedJob(job_id="b", sequences=[said("b", "even")])])
    writer.close()
    assert names(index) == ["b", "a"]
    assert index.loads() == {0: 2.5}


def test_kl_and_staleness_come_from_the_stored_logprobs(tmp_path: Path, index: HistoryIndex) -> None:
    columns: dict[str, Any] = {"logprobs": FloatArray([0.0, -1.0, -1.0, -2.0]), "versions": Runs.of([-1, 2, 2, 2])}
    sample, result = training_sample("a:0", **columns), sequence_result("a")
    writer = store(tmp_path)
    facts = row("a", version_min=2, version_max=2)
    writer.record([FinishedJob(job_id="a", sequences=[Finished.of(facts, result, sample, None)])])
    writer.close()
    scores = {"proximal_logprobs": FloatArray([0.0, -1.5, -1.0, -9.0]), "proximal_versions": Runs.of([-1, 3, 3, -1])}
    trained = Trained(seq_id="a:0", step=4, version=5, state="trained", **scores)
    ratio = -0.5
    assert k3(trained, sample) == (pytest.approx(math.exp(ratio) - 1 - ratio, abs=1e-6), 2)
    trainer = TrainedStore(tmp_path / TRAINER)
    trainer.record([trained, Trained(seq_id="gone:0", step=4, version=5, state="trained")])
    trainer.close()
    index.catch_up(10)
    [step] = index.steps()
    assert (step.step, step.lag_mean, step.lag_max) == (4, 3.0, 3)
    assert step.kl == pytest.approx((math.exp(ratio) - 1 - ratio) / 2, abs=1e-6)


def trained(job_id: str, step: int, version: int = 5, **changes: Any) -> Trained:
    return Trained(**{"seq_id": f"{job_id}:0", "step": step, "version": version, "state": "trained", **changes})


def lags(index: HistoryIndex) -> dict[int, tuple[float, int]]:
    index.catch_up(10)
    return {one.step: (one.lag_mean, one.lag_max) for one in index.steps()}


def test_a_sequence_that_is_trained_again_counts_in_its_last_step_alone(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    trainer = TrainedStore(tmp_path / TRAINER)
    trainer.record([trained("a", 1), trained("b", 1), trained("c", 2)])
    assert lags(index) == {1: (3.5, 5), 2: (2.0, 2)}
    trainer.record([trained("c", 2, version=7)])
    assert lags(index) == {1: (3.5, 5), 2: (4.0, 4)}, "the newest of the file"
    trainer.record([trained("a", 2), trained("b", 1)])
    assert lags(index) == {1: (2.0, 2), 2: (4.5, 5)}
    trainer.record([trained("b", 1, state="dropped", reason="stale")])
    assert lags(index) == {2: (4.5, 5)}
    trainer.close()


def test_steps_whose_sequences_were_pruned_stay(tmp_path: Path, index: HistoryIndex) -> None:
    fill(tmp_path)
    trainer = TrainedStore(tmp_path / TRAINER, max_sequences=2)
    for step, job_id in enumerate("abcd"):
        trainer.record([trained(job_id, step)])
        index.catch_up(10)
    trainer.close()
    assert lags(index) == {0: (5.0, 5), 1: (2.0, 2), 2: (2.0, 2), 3: (1.0, 1)}
    with closing(sqlite3.connect(tmp_path / NAME)) as db:
        assert db.execute("select seq_id from trained order by num").fetchall() == [("c:0",), ("d:0",)]


def test_whatever_was_indexed_changes_the_stamp(tmp_path: Path, index: HistoryIndex) -> None:
    stamps = [index.stamp()]

    def noted() -> int:
        index.catch_up(10)
        stamps.append(index.stamp())
        return len(set(stamps))

    fill(tmp_path)
    assert noted() == 2
    trainer = TrainedStore(tmp_path / TRAINER)
    trainer.record([trained("a", 1)])
    assert noted() == 3, "of the trainer alone"
    assert noted() == 3, "nothing was"
    trainer.close()
    for path in tmp_path.glob(f"{TRAINER}*"):
        path.unlink()
    trainer = TrainedStore(tmp_path / TRAINER)
    trainer.record([trained("b", 1)])
    trainer.close()
    assert noted() == 4, "another file"
