"""What is done with mutants, and what may come of it: a value that can go on, or an error of ours. Nothing else.

`tests/unit/test_fuzz.py` runs a sample; `make soak` runs all of it (`tests/soak/test_fuzz.py`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sluice.consumers.audit.stored import trained_versions
from sluice.consumers.groups import Assembler
from sluice.consumers.history.records import SequenceRow, pack, unpack
from sluice.consumers.samples import Sampler
from sluice.consumers.tasks import exact_answer
from sluice.consumers.tasks.task import Task, TaskContext
from sluice.consumers.training import checkpoint
from sluice.consumers.training.checkpoint import TrainerState, read_state, write_state
from sluice.consumers.training.step_log import KeptRollouts, StepLog, read_rollouts, read_steps
from sluice.consumers.training.trackers import read_sent
from sluice.pipeline.broker.connection import broker_url
from sluice.pipeline.config import load_config, resolved_yaml
from sluice.pipeline.config.types import BrokerConfig, ConsumerConfig, RolloutMatchingConfig
from sluice.pipeline.errors import SluiceError
from sluice.pipeline.files import write_atomic
from sluice.pipeline.prompts.rows import Malformed, read_rows
from sluice.pipeline.queue.dead_letters import _row as read_letter_row
from sluice.pipeline.queue.envelope import arq_payload, arq_serializer, read_envelope
from sluice.pipeline.queue.live_jobs import parse_log
from sluice.pipeline.queue.queue import joined, packed
from sluice.pipeline.queue.trained import INDEX, LEDGER, TrainedIds, trained_among
from sluice.pipeline.status.heartbeat import Heartbeat, read_row
from sluice.pipeline.weights.versions import read_manifest, tensor_table
from sluice.pipeline.wire.codec import Wire
from sluice.pipeline.wire.messages import (
    DeadLetter,
    DecodeJob,
    ImageRef,
    Progress,
    ScoreJob,
    ScoreResult,
    SequenceResult,
    TokenDelta,
    TrainingBatch,
    WeightVersion,
    decode,
    encode,
)
from sluice.pipeline.wire.tokens import FloatArray, Runs, TokenArray
from sluice.producers.source import Row, identity
from sluice.workers.offline.answers import Answer
from sluice.workers.offline.sinks import header_line, recover
from tests import mutants
from tests.damage import HEARTBEAT
from tests.factories import decode_job, sequence_result, training_sample
from tests.rollout_state import head, turn
from tests.tiny_tokenizer import tiny_codec

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
CONTEXT = TaskContext(tiny_codec("bytes"), RolloutMatchingConfig(task="exact_answer"))
TASK = Task("exact_answer", exact_answer.parse, exact_answer.match, exact_answer.target)

_ODD_YAML = [
    b"", b"null", b"-1", b"0", b".nan", b".inf", b"-.inf", b"9" * 19, b"9" * 30, b"1e400", b"0x1f", b"1_000", b"yes",
    b"[]", b"{}", b"[1, 2]", b"x", b"''", b"&a [*a]", b"*b", b"2026-01-01", b'"\\ud800"', b"!!binary aGk=",
    b"!!python/object:x {}", b"{a: {b: {c: d}}}", b"!!set {a, b}", b"? [1]", b"|",
]  # fmt: skip
_LETTER = DeadLetter(seq_id="r:a:0", reason="failed", detail="why", at=1.7e9)
_PROGRESS = Progress(offset=0, token_ids=TokenArray([1, 2]), logprobs=FloatArray([-1, -2]), versions=Runs.of([0, 1]))
_PLAIN = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "sampling": {"seed": 1}, "images": [{"path": "a"}]}

MESSAGES: list[Wire] = [
    decode_job("r:a", n=2, truth={"x": [1]}, images=[ImageRef(path="a.png")], metadata={"row": 1}, deadline_s=5.0),
    decode_job("r:b", messages=[], prompt_token_ids=TokenArray([1, 2, 3]), reply_to="g", trace={"traceparent": "x"}),
    sequence_result("r:a", 1, 2, truth="seven", task="exact_answer", timings={"queue_s": 0.5}, triggers={"rule": "x"}),
    sequence_result("g", rollout_id="g", turn=2, response_mask=Runs.of([1, 0, 1]), reward=0.5),
    _PROGRESS,
    ScoreJob(
        run="r", seq_id="r:a:0", prompt_token_ids=TokenArray([1]), token_ids=TokenArray([2]), positions=TokenArray([0]),
        version=3,
    ),
    ScoreResult(seq_id="r:a:0", scored_version=3, positions=TokenArray([0]), logprobs=FloatArray([-1.0])),
    TokenDelta(seq_id="r:a:0", offset=0, token_ids=TokenArray([1]), logprobs=FloatArray([-1.0]), text="é"),
    training_sample("r:a:0", metrics={"x": 1.0}, left_out=Runs.of([0, 0, 1, 0])),
    TrainingBatch(batch_id="b", samples=[training_sample("r:a:0")], rows=[[0]], metrics={"x": 1.0}),
    WeightVersion(
        version=3, path="/x", digest="d", tensors={"a": ("F32", (2, 3))}, probe_score=-1.5, published_at=1.7e9
    ),
    _LETTER,
    head("r", truth={"a": [1]}, request={"messages": []}, opened_at=1.7e9),
    turn("a"),
]  # fmt: skip

OTHERS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "arq's envelope": (arq_payload(decode_job("r:a", n=2)), lambda raw: _kept(read_envelope("r:a", raw).job)),
    "an envelope with a map": (
        arq_serializer({"t": None, "f": "decode", "a": [_PLAIN], "k": {}, "et": 1}),
        lambda raw: _kept(read_envelope("r:a", raw).job),
    ),
    "an envelope with fields": (
        arq_serializer({"t": None, "f": "decode", "a": [], "k": _PLAIN, "et": 1}),
        lambda raw: _kept(read_envelope("r:a", raw).job),
    ),
    "stored progress": (packed(_PROGRESS) + packed(msgspec.structs.replace(_PROGRESS, offset=2)), joined),
    "a log": (b"1700000000000\tc\t1\tw\t\n1700000000001\tx\t1\tw\tcommitted\n", parse_log),
    "a row of the history": (
        pack(SequenceRow(seq_id="r:a:0", job_id="r:a", index=0, group_size=1, state="dead", at=1.7e9)),
        lambda raw: pack(unpack(SequenceRow, raw)),
    ),
}
HEARTBEATS = [
    msgspec.json.encode({**HEARTBEAT, "at": 1.7e9, "facts": {"version": 3, "tokens": 7, "owner": "x", "engine": "hf"}}),
    msgspec.json.encode({**HEARTBEAT, "at": 1.7e9, "waiting_for": "x", "waiting_since": 1.7e9, "error": "e"}),
]


def messages(count: int, seed: int = 0) -> int:
    """Every wire type, envelopes, progress, logs, letters; returns how many mutants could be read."""
    read = 0
    kinds = [(type(one), encode(one)) for one in MESSAGES]
    readers: list[tuple[bytes, Callable[[bytes], Any]]] = [
        *((raw, lambda data, kind=kind: _kept(decode(kind, data))) for kind, raw in kinds),
        *OTHERS.values(),
        (encode(_LETTER), _as_letter),
    ]
    seeds = [raw for raw, _ in readers]
    for which, raw in mutants.each(count, seed, seeds, _any_bytes):
        read += may_fail(readers[which][1], raw)
    return read


def heartbeats(count: int, seed: int = 0) -> int:
    """Rows of processes, as roles and views read them."""
    return sum(
        may_fail(lambda data: msgspec.json.encode(read_row(data, Heartbeat)), raw)
        for _, raw in mutants.each(count, seed, HEARTBEATS, mutants.of_json)
    )


def results(count: int, seed: int = 0) -> int:
    """Results that can be read go through a consumer's steps: each is a sample or a letter, and never an error."""
    sampler = Sampler(TASK, CONTEXT, ConsumerConfig())
    ids = TokenArray(CONTEXT.codec.encode("seven"))
    honest = sequence_result(
        "r:a", token_ids=ids, logprobs=FloatArray([-0.5] * len(ids)), versions=Runs.of([0] * len(ids)),
        truth="seven", task="exact_answer",
    )  # fmt: skip

    def consume(raw: bytes) -> None:
        result = decode(SequenceResult, raw)
        changed = msgspec.structs.replace(result, group_size=1, index=0, part=0, parts=1, group_id="r:a")
        group = Assembler().add_result("1-0", changed)
        assert group is not None
        samples, letters = sampler.samples_of(group)
        assert len(samples) + len(letters) == 1
        for one in (*samples, *letters):
            _kept(one)

    return sum(may_fail(consume, raw) for _, raw in mutants.each(count, seed, [encode(honest)], mutants.of_message))


def configs(count: int, seed: int, directory: Path) -> int:
    """The shipped configurations: a mutant is a ConfigError, or can be stored and read again."""
    path, again = directory / "c.yaml", directory / "again.yaml"

    def load(raw: bytes) -> None:
        path.write_bytes(raw)
        config = load_config(path, environ={})
        again.write_text(resolved_yaml(config))
        load_config(again, environ={})

    seeds = [file.read_bytes() for file in CONFIGS]
    return sum(may_fail(load, raw) for _, raw in mutants.each(count, seed, seeds, _of_yaml))


def rows(count: int, seed: int, directory: Path) -> int:
    """Lines of JSONL: each is a row whose job can be enqueued, or malformed."""
    honest = [
        msgspec.json.encode({"id": "a", "messages": [{"role": "user", "content": "é"}], "truth": {"a": [1]}}),
        msgspec.json.encode({"messages": [{"role": "u", "content": [{"type": "text", "text": "x"}]}], "images": ["a"]}),
        msgspec.json.encode({"id": 7, "messages": [{"role": "u", "content": None}], "metadata": {"x": {"y": 1.5}}}),
    ]  # fmt: skip
    path = directory / "rows.jsonl"
    lines = [raw.replace(b"\n", b" ") for _, raw in mutants.each(count, seed, honest, mutants.of_json)]
    path.write_bytes(b"\n".join(lines))
    read = 0
    for row in read_rows(path, Row, parquet=False):
        if not isinstance(row, Malformed):
            read += may_fail(_enqueued, row)
    return read


def _enqueued(row: Row) -> None:
    job = DecodeJob(
        run="r", job_id="r:a", messages=row.messages, images=row.image_refs(), truth=row.truth,
        metadata={**row.metadata, "row": identity(row)[:256]},
    )  # fmt: skip
    arq_payload(job)


def files(directory: Path, step: int = 1) -> int:
    """Every byte of every small file of a run; `step` looks at every so many."""
    read = 0
    for name, path, load in _small_files(directory):
        whole = path.read_bytes()
        load()
        for raw in mutants.every_byte(whole, step):
            path.write_bytes(raw)
            read += may_fail(lambda data, load=load: load(), raw, name)
        path.write_bytes(whole)
    return read


def checkpoints(directory: Path, step: int = 1) -> None:
    """Every byte of the small files of a checkpoint: none that was changed is gone on from."""
    shutil.rmtree(directory, ignore_errors=True)
    home = directory / "step-000001"
    (home / "trainer").mkdir(parents=True)
    saved = {
        "config.json": b'{"model_type": "x"}',
        "trainer/state.json": b'{"step": 1}',
        "trainer/optimizer.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    }
    for name, raw in saved.items():
        (home / name).write_bytes(raw)
    table = msgspec.json.encode({name: hashlib.sha256(raw).hexdigest() for name, raw in saved.items()})
    (home / "trainer/digests.json").write_bytes(table)
    for name, whole in (saved | {"trainer/digests.json": table}).items():
        assert checkpoint.newest(directory) == home
        for raw in mutants.every_byte(whole, step):
            if raw == whole:
                continue
            (home / name).write_bytes(raw)
            assert not may_fail(lambda _: checkpoint.newest(directory), raw, name), (name, raw)
        (home / name).write_bytes(whole)


def _small_files(directory: Path) -> list[tuple[str, Path, Callable[[], Any]]]:
    shutil.rmtree(directory, ignore_errors=True)
    version = directory / "weights" / "v000001"
    version.mkdir(parents=True)
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (version / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    (version / "manifest.json").write_bytes(
        msgspec.json.encode({"kind": "weight_version", "version": 1, "path": "x", "digest": "d", "step": 1})
    )
    write_state(directory, TrainerState(step=3, samples=4, unacked=[("1-0", 2)], recent=["a"]))
    log = StepLog(directory / "metrics.jsonl")
    for number in (1, 2):
        log.append(number, version=number, loss=0.5)
    kept = directory / "rollouts"
    KeptRollouts(kept, None).save(1, [training_sample("r:a:0")])
    (directory / "config.resolved.yaml").write_text("run: r\ntrainer: {learning_rate: 1e-3}\nseed: 7\n")
    (directory / "broker.json").write_text('{"url": "redis://127.0.0.1:1/0", "pid": 7}')
    part, begun = directory / "a.part", {"input": "abc", "temperature": 0.5}
    answers = [Answer(row=row, index=0, text="é", finish_reason="stop", num_new_tokens=3).line("all") for row in (0, 1)]
    part.write_bytes(header_line(begun) + b"".join(answers))
    resolved, broker = directory / "config.resolved.yaml", BrokerConfig(embedded_dir=str(directory))

    sent = directory / "tracking" / "t.json"
    write_atomic(sent, b'{"id":"12345678","step":7}')
    StepLog(directory / LEDGER).append(1, seq_ids=["r:a:0", "r:b:0"])

    def trained() -> None:
        (directory / INDEX).unlink(missing_ok=True)
        ids = TrainedIds(directory)
        ids.open(1)
        ids.known(["r:a:0"])
        ids.close()
        trained_among(directory, ["r:b:0"])

    def recovered() -> None:
        with part.open("rb") as stream:
            recover(stream, header_line(begun), "a.part")

    return [
        ("header", version / "model.safetensors", lambda: tensor_table(version)),
        ("manifest", version / "manifest.json", lambda: read_manifest(version)),
        ("handoff", directory / "handoff.json", lambda: read_state(directory)),
        ("ledger", log.path, lambda: (read_steps(log.path), trained_versions(directory), log.cut_after(2))),
        ("rollouts", kept / "step-000001.msgpack", lambda: list(read_rollouts(kept))),
        ("config", resolved, lambda: load_config(resolved, environ={})),
        ("broker", directory / "broker.json", lambda: broker_url(broker)),
        ("part", part, recovered),
        ("trained", directory / LEDGER, trained),
        ("tracker", sent, lambda: read_sent(sent)),
    ]  # fmt: skip


def may_fail(act: Callable[[Any], Any], raw: Any, name: str = "") -> bool:
    """True when nothing was wrong; an error that is none of ours fails the test and shows the input."""
    try:
        act(raw)
    except SluiceError as error:
        if not str(error):
            raise AssertionError(f"{name} {error!r} says nothing about {raw!r:.3000}") from error
        return False
    except Exception as error:
        raise AssertionError(f"{name} {error!r} of {raw!r:.3000}") from error
    return True


def _kept(message: Wire | None) -> None:
    """What was read can be written, shown and read again."""
    if message is None:
        return
    raw = encode(message)
    decode(type(message), raw)
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, Runs):
            assert len(value.expand()) == len(value)


def _as_letter(raw: bytes) -> None:
    read_letter_row("1-0", {b"d": raw, b"g": raw[:20], b"i": raw[-3:], b"n": raw[:2]})


def _any_bytes(raw: bytes, others: Any, randomly: Any) -> bytes:
    try:
        return mutants.of_message(raw, others, randomly)
    except msgspec.MsgspecError:  # progress and logs are no msgpack
        return mutants.of_bytes(raw, others, randomly)


def _of_yaml(raw: bytes, others: Any, randomly: Any) -> bytes:
    if randomly.random() < 0.3:
        return mutants.of_bytes(raw, others, randomly)
    lines = raw.splitlines(keepends=True)
    for _ in range(randomly.randint(1, 3)):
        at = randomly.randrange(len(lines))
        key, colon, _ = lines[at].partition(b":")
        odd = randomly.choice(_ODD_YAML)
        choice = randomly.randrange(4)
        if choice < 3 and colon:
            lines[at] = key + b": " + odd + b"\n"
        elif choice == 3:
            lines.insert(at, randomly.choice(lines))
    return b"".join(lines)
