"""`sluice generate` on a tiny real model: to the end, killed and resumed, interrupted, and with rows that are wrong.

Texts are compared by the byte; logprobs are not, as what is decoded beside a sequence changes their rounding.
"""

from __future__ import annotations

import io
import json
import re
import runpy
import signal
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sluice.pipeline.cli import main as cli
from tests.deadlines import RUN_S
from tests.e2e.processes import BIN, Process, environment, launch
from tests.e2e.slow_plugin import QUICK, SLOW
from tests.pictures import png
from tests.tiny_models import save_tiny_model
from tests.tiny_vlms import save_tiny_llava

DOCS = Path(__file__).parents[2] / "docs" / "generate.md"
ROWS = 60
SAMPLED = ("--max-new-tokens", "24", "--temperature", "1", "--n", "2", "--fields", "minimal", "--torch-threads", "1")
SLOWLY = ("--max-batch", "1", "--plugin", "slow:Slow")  # one by one, so that there is a middle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", [{"id": f"q{at}", "prompt": f"say {at}"} for at in range(ROWS)])


@pytest.fixture
def generate(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command in this process; returns (exit code, stdout, stderr)."""

    def call(source: Path, out: Path | str, *options: str, directory: Path = model) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main(["generate", "--model", str(directory), "--in", str(source), "--out", str(out), *options])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capfd.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """Serves the files of the test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """The command as a process of its own."""
    started: list[Process] = []

    def begin(source: Path, out: Path, *options: str) -> Process:
        command = [str(BIN / "sluice"), "generate", "--model", str(model), "--in", str(source), "--out", str(out)]
        log, env = tmp_path / "logs" / str(len(started)), environment("generate", TEST_SLOW="1")
        started.append(launch([*command, *options], name="generate", log=log, env=env, cwd=tmp_path))
        return started[-1]

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.kill()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_answers(part: Path, count: int, process: Process) -> None:
    until = time.monotonic() + RUN_S
    while not part.exists() or part.read_bytes().count(b"\n") <= count:
        assert process.popen.poll() is None, f"it ended before {count} answers\n{process.tail()}"
        assert time.monotonic() < until, process.tail()
        time.sleep(0.01)


def test_killed_and_interrupted_and_resumed_it_writes_what_one_run_writes(
    generate: Callable[..., Any],
    start: Callable[..., Process],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    sampled = (*SAMPLED, "--plugin", "slow:Slow")
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out" / "a.jsonl"
    out.parent.mkdir()
    part = out.with_name("a.jsonl.part")
    restarted = start(prompts, out, *SAMPLED, *SLOWLY, "--restart")
    wait_for_answers(part, QUICK // 2, restarted)
    restarted.signal(signal.SIGINT)
    assert restarted.wait() == 130, restarted.tail()
    assert "the same command without --restart continues from there" in restarted.text()
    first = start(prompts, out, *SAMPLED, *SLOWLY)
    wait_for_answers(part, QUICK // 2, first)
    first.kill()
    with part.open("ab") as stream:
        stream.write(b'{"id":"q9","row":')  # as if the power had gone
    second = start(prompts, out, *SAMPLED, *SLOWLY)
    wait_for_answers(part, QUICK, second)
    second.signal(signal.SIGINT)
    assert second.wait() == 130, second.tail()
    said = second.text()
    assert "answers are already done" in said
    assert "the same command continues from there" in said
    assert "Traceback" not in said
    assert [path.name for path in out.parent.iterdir()] == ["a.jsonl.part"], "interrupted after its end"
    code, _, said = generate(prompts, out, *sampled, "--seed", "1")
    assert (code, "another seed (0)" in said) == (2, True)
    header = part.read_bytes().splitlines(keepends=True)[0]
    code, said, _ = generate(prompts, out, *sampled, "--json")  # the batch size is free
    assert code == 0
    assert json.loads(said)["done_before"] >= QUICK
    assert generate(prompts, whole, *sampled)[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["a.jsonl"]
    part.write_bytes(header + out.read_bytes())  # killed between the rename and the end
    assert generate(prompts, out, *sampled)[0] == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not part.exists()
    found = answers(out)
    assert [(one["row"], one["index"]) for one in found] == [(row, index) for row in range(ROWS) for index in (0, 1)]
    assert len({one["text"] for one in found}) > ROWS, "the sequences of a prompt are all alike"


def test_an_answer_says_all_and_depends_on_its_row_and_index_alone(
    generate: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"prompt": "the abc", "id": 3, "metadata": {"k": [1]}}, {"prompt_token_ids": [5, 6, 7]}]
    source, one, two = write(tmp_path / "in.jsonl", rows), tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    options = ("--max-new-tokens", "6", "--temperature", "1")
    code, out, _ = generate(source, one, *options, "--json")
    summary = json.loads(out)
    assert code == 0
    assert (summary["rows"], summary["ok"], summary["errors"]) == (2, 2, 0)
    assert generate(source, two, *options, "--n", "2", "--max-batch", "1")[0] == 0
    first, second = answers(one)
    assert (first["id"], first["metadata"], second["prompt_token_ids"]) == (3, {"k": [1]}, [5, 6, 7])
    assert len(first["token_ids"]) == len(first["logprobs"]) == first["num_new_tokens"] <= 6
    assert first["num_prompt_tokens"] == len(first["prompt_token_ids"])
    assert first["engine"]["backend"] == "hf"
    assert summary["tokens"] == first["num_new_tokens"] + second["num_new_tokens"]
    pairs = answers(two)
    assert [pairs[0]["token_ids"], pairs[2]["token_ids"]] == [first["token_ids"], second["token_ids"]]
    assert pairs[1]["token_ids"] != pairs[0]["token_ids"]


def test_a_finished_output_is_replaced_only_when_asked(
    generate: Callable[..., Any], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text("precious")
    code, _, said = generate(prompts, out)
    assert (code, "--restart" in said, out.read_text()) == (2, True, "precious")
    one = write(tmp_path / "one.jsonl", [{"prompt": "a"}])
    assert generate(one, out, "--max-new-tokens", "2", "--restart")[0] == 0
    assert len(answers(out)) == 1


def test_parquet_in_and_out(generate: Callable[..., Any], tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    messages = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.Table.from_pylist([{"id": "a", "messages": messages}, {"id": "b", "messages": messages}]), source)
    assert generate(source, out, "--max-new-tokens", "3")[0] == 0
    table = pq.read_table(out)
    assert table["id"].to_pylist() == ["a", "b"]
    assert [len(ids) for ids in table["token_ids"].to_pylist()] == table["num_new_tokens"].to_pylist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_malformed_rows_stop_it_or_become_error_rows(generate: Callable[..., Any], tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", [{"prompt": "a"}, "{nonsense", {"prompt_token_ids": [99999]}, {"prompt": "b"}]
    )
    out = tmp_path / "a.jsonl"
    code, _, said = generate(source, out)
    assert code == 3
    assert f"{source}:2: malformed row" in said
    assert "--on-malformed skip" in said
    assert not out.exists()
    code, _, said = generate(source, out, "--on-malformed", "skip", "--max-new-tokens", "2")
    assert code == 9
    assert f"row 1: {source}:2: malformed row" in said
    assert "row 2: token id 99999 is outside" in said
    assert "every row failed" not in said
    first, malformed, refused, last = answers(out)
    assert [one["finish_reason"] == "error" for one in (first, malformed, refused, last)] == [False, True, True, False]
    assert malformed["error"].startswith(f"{source}:2: malformed row")
    assert malformed["engine"] is None
    assert "token id 99999 is outside" in refused["error"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--temprature", "1"), 2, "--temperature"),
        (("--top-p", "3"), 2, "top_p must be in (0, 1]"),
        (("--backend", "hff"), 2, "vllm"),
        (("--plugin", "balanced"), 2, "did you mean 'balanced_json'?"),
    ],
)
def test_a_bad_option_is_refused(
    generate: Callable[..., Any], prompts: Path, tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    found, out, err = generate(prompts, tmp_path / "a.jsonl", *options)
    assert found == code
    assert words in " ".join((out + err).split())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_wrong_model_directory_is_a_model_error(
    generate: Callable[..., Any], prompts: Path, model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
    for directory, words in ((tmp_path / "nosuch", "no such directory"), (tmp_path, "no config.json"), (damaged, "")):
        code, _, said = generate(prompts, tmp_path / "a.jsonl", directory=directory)
        assert code == 5, said
        assert f"{directory}" in said
        assert words in said
        assert "answers are done" not in said, "nothing was begun"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "in.jsonl"]


def test_standard_input_to_standard_output_carries_answers_alone(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 2}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    options = ("--max-new-tokens", "2", "--stop", "-", "--stop-token-ids", "5", "--plugin", "balanced_json")
    code, out, err = generate("-", "-", *options)
    assert code == 0
    assert sorted(json.loads(line)["id"] for line in out.splitlines()) == [1, 2]
    assert "standard output: 2 rows, 2 ok, 0 errors" in err


def test_rows_with_and_without_an_image_in_one_file(generate: Callable[..., Any], tmp_path: Path) -> None:
    vlm = save_tiny_llava(tmp_path / "vlm")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 30), "red").save(tmp_path / "pictures" / "red.png")
    rows = [{"prompt": "a"}, {"prompt": "b", "images": ["pictures/red.png"]}, {"prompt": "c", "images": ["no.png"]}]
    rows.append({"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    out = tmp_path / "a.jsonl"
    source = write(tmp_path / "in.jsonl", rows)
    code, _, said = generate(source, out, "--max-new-tokens", "3", directory=vlm)
    assert code == 3
    assert "in.jsonl:4: malformed row: `images` has 0 entries and the messages have 1 image parts" in said
    code, _, said = generate(source, out, "--max-new-tokens", "3", "--on-malformed", "skip", directory=vlm)
    assert code == 9, said
    text, seen, missing, blind = answers(out)
    assert [text["num_new_tokens"], seen["num_new_tokens"]] == [3, 3]
    assert seen["num_prompt_tokens"] > text["num_prompt_tokens"]
    assert "no.png: cannot be read" in missing["error"]
    assert "give one image for each part" in blind["error"]


def test_images_as_bytes_by_url_and_by_digest_are_one_image(
    generate: Callable[..., Any], tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    """A server that is gone says nothing about a row: the command ends, and continues there."""
    vlm, data = save_tiny_llava(tmp_path / "vlm"), png("red", 40, 30)
    digest = sha256(data).hexdigest()
    (tmp_path / "red.png").write_bytes(data)
    (tmp_path / digest).write_bytes(data)
    url = f"http://127.0.0.1:{server.server_port}"
    kinds: list[Any] = ["red.png", {"bytes": b64encode(data).decode()}, f"{url}/red.png", f"sha256:{digest}"]
    source = write(tmp_path / "in.jsonl", [{"prompt": "what?", "images": [one]} for one in kinds])
    hosts, out = ("--set", f"images.hosts=[127.0.0.1:{server.server_port}]"), tmp_path / "a.jsonl"
    code, _, said = generate(source, out, "--max-new-tokens", "3", *hosts, directory=vlm)
    assert code == 0, said
    first, *others = answers(out)
    assert first["num_new_tokens"] == 3
    assert all(one["token_ids"] == first["token_ids"] for one in others)
    stranger = {"prompt": "what?", "images": ["http://127.0.0.2/red.png"]}
    wrong = [stranger, {"prompt": "what?", "images": [{"path": "red.png", "sha256": "0" * 64}]}]
    code, _, said = generate(write(tmp_path / "b.jsonl", wrong), tmp_path / "b-out.jsonl", *hosts, directory=vlm)
    assert code == 9
    assert "add it to images.hosts" in answers(tmp_path / "b-out.jsonl")[0]["error"]
    assert "its bytes have sha256" in answers(tmp_path / "b-out.jsonl")[1]["error"]
    server.shutdown()
    server.server_close()
    code, _, said = generate(source, out, "--max-new-tokens", "3", "--restart", *hosts, directory=vlm)
    assert code == 8
    assert re.search(r"row 2.*red\.png: .*3 times; check the server", said), said


def test_a_text_model_answers_the_rows_without_an_image(generate: Callable[..., Any], tmp_path: Path) -> None:
    image = {"prompt": "what?", "images": ["no.png"]}
    both = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {**image, "id": "q", "metadata": {"k": 1}}])
    out = tmp_path / "a.jsonl"
    code, said, _ = generate(both, out, "--max-new-tokens", "2", "--json")
    assert code == 9
    text, refused = answers(out)
    assert (text["num_new_tokens"], text["error"]) == (2, None)
    assert (refused["id"], refused["metadata"], refused["finish_reason"]) == ("q", {"k": 1}, "error")
    assert "does not support images" in refused["error"]
    assert json.loads(said)["first_error"] == refused["error"]
    alone = write(tmp_path / "alone.jsonl", [image, image])
    code, _, said = generate(alone, out, "--restart")
    assert code == 9
    assert re.search(r"row 0: the hf backend does not support images .*; 1 more\n", said)
    assert f"every row failed; fix the options and replace {out} with --restart" in said


def test_a_file_without_rows_is_answered_with_a_warning(generate: Callable[..., Any], tmp_path: Path) -> None:
    code, _, said = generate(write(tmp_path / "in.jsonl", []), tmp_path / "a.jsonl")
    assert (code, (tmp_path / "a.jsonl").read_bytes()) == (0, b"")
    assert "has no rows" in said


def test_the_example_of_the_docs_runs_as_it_is_printed(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert example.count("./my-model") == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace("./my-model", str(model)))
    runpy.run_path(str(script))
    assert re.search(r"^(length|stop) \d+ '", capfd.readouterr().out, flags=re.MULTILINE)
