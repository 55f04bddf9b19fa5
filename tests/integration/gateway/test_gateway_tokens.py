"""Text and tokens without a chat, over a real broker, worker and HTTP server; answers are read by vLLM's own models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.pipeline.config.types import BrokerConfig, Config
from sluice.pipeline.wire.keys import Keys
from sluice.producers.tokenizer import load_renderer
from sluice.workers.engine.hf import HfBackend
from tests.contract.engine_fixtures import started
from tests.integration.gateway.harness import USER, Gateway, published, serving
from tests.roles import run_config
from tests.tiny_models import CONTEXT, save_tiny_model

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(source: Path) -> Iterator[HfBackend]:
    with started(source, max_batch=4) as running:
        yield running


@pytest.fixture
def config(broker_config: BrokerConfig, keys: Keys, run_dir: Path, source: Path) -> Config:
    worker = {"lease_s": 30.0, "renew_s": 0.1, "poll_s": 0.01, "max_batch": 4, "drain_s": 10.0}
    return run_config(broker_config, keys, run_dir, worker=worker, model={"path": str(source)})


async def streamed(gateway: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    """The events before `[DONE]`."""
    async with gateway.http.post(gateway.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_generate_returns_the_very_tokens_of_a_chat_with_the_same_prompt(
    config: Config, backend: HfBackend
) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateTokensResponse,
        GenerateTokensStreamResponse,
    )
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

    async with serving(config, backend) as gateway:
        chat = await gateway.chat([USER], **GREEDY, logprobs=True)
        status, tokens = await gateway.post("/tokenize", {"messages": [USER], "return_token_strs": True})
        assert status == 200, tokens
        tokenized = TokenizeResponse.model_validate(tokens)
        assert tokenized.tokens == chat["prompt_token_ids"]
        assert (tokenized.count, tokenized.max_model_len) == (len(tokenized.tokens), CONTEXT)
        assert len(tokenized.token_strs or []) == tokenized.count

        sampling = {**GREEDY, "logprobs": 1, "skip_special_tokens": False}
        body = {"model": "policy", "token_ids": tokenized.tokens, "sampling_params": sampling, "request_id": "q-1"}
        status, answer = await gateway.post(GENERATE, body | {"return_token_ids": True})
        assert status == 200, answer
        read = GenerateTokensResponse.model_validate(answer)
        [choice] = read.choices
        assert (choice.token_ids, read.prompt_token_ids) == (chat["token_ids"], chat["prompt_token_ids"])
        assert choice.logprobs
        assert [entry.logprob for entry in choice.logprobs.content or []] == chat["logprobs"]
        assert [entry.token_id for entry in choice.logprobs.content or []] == chat["token_ids"]
        assert [one["token"] for one in answer["choices"][0]["logprobs"]["content"]] == [
            f"token_id:{token}" for token in chat["token_ids"]
        ]
        spans = choice.weight_versions or []
        assert [(span.version, span.start, span.end) for span in spans] == [("0", 0, len(chat["token_ids"]))]
        assert (read.request_id, choice.finish_reason) == ("q-1", chat["choices"][0]["finish_reason"])

        events = await streamed(gateway, GENERATE, body | {"stream_options": {"include_usage": True}})
        chunks = [GenerateTokensStreamResponse.model_validate(event) for event in events]
        parts = [one for chunk in chunks for one in chunk.choices]
        assert len(parts) > 1, "more than one event"
        assert [token for part in parts for token in part.token_ids or []] == chat["token_ids"]
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
        assert [entry.logprob for entry in entries] == chat["logprobs"]
        assert chunks[-1].usage
        assert chunks[-1].usage.completion_tokens == len(chat["token_ids"])

        status, text = await gateway.post("/detokenize", {"tokens": tokenized.tokens})
        tokenizer = load_renderer(config.model.path).tokenizer
        assert DetokenizeResponse.model_validate(text).prompt == tokenizer.decode(tokenized.tokens)
        status, text = await gateway.post("/tokenize", {"prompt": text["prompt"], "add_special_tokens": False})
        assert text["tokens"] == tokenized.tokens


async def test_completions_of_texts_and_ids_are_what_was_sampled(config: Config, backend: HfBackend) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse

    tokenizer = load_renderer(config.model.path).tokenizer
    ids = tokenizer.encode("the abc ")
    async with serving(config, backend) as gateway:
        body: dict[str, Any] = {"prompt": "the abc ", **GREEDY, "logprobs": 0, "return_token_ids": True}
        status, answer = await gateway.post("/v1/completions", body)
        assert status == 200, answer
        [choice] = CompletionResponse.model_validate(answer).choices
        assert choice.prompt_token_ids == ids
        assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True), "white space is kept"
        assert choice.logprobs
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(choice.token_ids or [])
        events = await streamed(gateway, "/v1/completions", body)
        parts = [one for event in events for one in CompletionStreamResponse.model_validate(event).choices]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids or []] == choice.token_ids
        logprobs = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
        offsets = [value for part in parts if part.logprobs for value in part.logprobs.text_offset]
        assert (logprobs, offsets) == (choice.logprobs.token_logprobs, choice.logprobs.text_offset)

        many: Any = await gateway.openai.completions.create(
            model="policy", prompt=[ids, ids[:3]], n=2, echo=True, max_tokens=4, seed=5
        )
        assert [one.index for one in many.choices] == [0, 1, 2, 3]
        assert [one.text.startswith("the abc ") for one in many.choices] == [True, True, False, False]
        assert many.usage.prompt_tokens == len(ids) + 3
        first = await streamed(gateway, "/v1/completions", {"prompt": ids, "echo": True, **GREEDY})
        assert "".join(event["choices"][0]["text"] for event in first) == "the abc " + choice.text
        status, answer = await gateway.post("/v1/completions", {"prompt": "the abc ", "stop": choice.text[3], **GREEDY})
        assert answer["choices"][0]["text"] == choice.text[: choice.text.index(choice.text[3])]
        assert answer["choices"][0]["stop_reason"] == choice.text[3]


async def test_turns_of_tokens_are_one_trajectory(config: Config, backend: HfBackend, client: Any, keys: Keys) -> None:
    path = f"/rollouts/t%2F1{GENERATE}"
    async with serving(config, backend) as gateway:
        prompt, more = [1, 2, 3], [7, 8]
        _, first = await gateway.post(path, {"token_ids": prompt, "sampling_params": GREEDY})
        said = first["choices"][0]["token_ids"]
        follows = {"token_ids": prompt + said + more, "sampling_params": GREEDY}
        _, second = await gateway.post(path, follows)
        assert (second["rollout"]["turn"], second["rollout"]["parent"]) == (1, 0)
        assert (await gateway.post(path, follows))[1]["choices"] == second["choices"], "a repeat is the same turn"
        text = {"prompt": prompt + said[:1] + more, "rollout_id": "t/1", **GREEDY}
        _, fork = await gateway.post("/v1/completions", text)
        assert fork["rollout"]["parent"] == -1, "what was sampled was changed"
        status, refused = await gateway.post(path, {**follows, "sampling_params": {"n": 2}})
        assert (status, refused["error"]["param"]) == (400, "n")
        assert (await gateway.finish("t%2F1"))[1]["parts"] == 2
    _, whole = await published(client, keys)
    assert list(whole.prompt_token_ids) == prompt
    assert list(whole.token_ids) == said + more + second["choices"][0]["token_ids"]
    tail = len(second["choices"][0]["token_ids"])
    assert whole.response_mask.expand() == [1] * len(said) + [0] * len(more) + [1] * tail


async def test_tokens_are_repeated_by_key_and_refused_by_name(config: Config, backend: HfBackend) -> None:
    config = msgspec.structs.replace(config, sampling=msgspec.structs.replace(config.sampling, max_new_tokens=4))
    async with serving(config, backend) as gateway:
        key = {"Idempotency-Key": "k"}
        one, two = [(await gateway.post(GENERATE, {"token_ids": [5, 6]}, **key))[1]["choices"] for _ in range(2)]
        assert one == two
        both = {"prompt": [[5, 6], [5, 6]]}
        one, two = [(await gateway.post("/v1/completions", both, **key))[1]["choices"] for _ in range(2)]
        assert one == two
        for path, body, expected in (
            (GENERATE, {"token_ids": [5], "sampling_params": {"min_tokens": 2}}, (400, "sampling_params.min_tokens")),
            (GENERATE, {"token_ids": [5], "model": "gpt-9"}, (404, "model")),
            (GENERATE, {"token_ids": []}, (422, "token_ids")),
            (GENERATE, {"token_ids": [5], "sampling_params": {"top_p": 2}}, (422, "sampling_params.top_p")),
            (GENERATE, {"token_ids": [2**31 - 1]}, (400, None)),
            (GENERATE, {"token_ids": [5] * (CONTEXT + 1)}, (400, None)),
            ("/v1/completions", {"prompt": "a", "guided_json": {}}, (400, "guided_json")),
            ("/v1/completions", {"prompt": "a" * 2**19}, (413, "prompt")),
            ("/tokenize", {"messages": [USER], "continue_final_message": True}, (400, "continue_final_message")),
            ("/tokenize", {"prompt": "a", "model": "gpt-9"}, (404, "model")),
            ("/detokenize", {"tokens": [2**30]}, (400, "tokens")),
            ("/detokenize", {"tokens": [1], "more": 1}, (400, "more")),
        ):
            status, answer = await gateway.post(path, body)
            assert (status, answer["error"]["param"]) == expected, answer


async def test_logprobs_are_computed_where_somebody_asks_for_them(config: Config, backend: HfBackend) -> None:
    async with serving(config, backend) as gateway:
        asked = await gateway.chat([USER], **GREEDY, logprobs=True)
        turn = await gateway.chat([USER], **GREEDY, rollout_id="r")
        bare = await gateway.chat([USER], **GREEDY)
        assert turn["token_ids"] == asked["token_ids"] == bare["token_ids"]
        assert turn["logprobs"] == asked["logprobs"]
        assert len(asked["logprobs"]) == len(asked["token_ids"])
        assert (bare["logprobs"], bare["choices"][0]["logprobs"]) == (None, None)
        body: dict[str, Any] = {"messages": [USER], **GREEDY}
        last = (await streamed(gateway, "/v1/chat/completions", body))[-1]
        assert (last["token_ids"], last["logprobs"]) == (bare["token_ids"], None)
        spoken: dict[str, Any] = {"input": "the abc", "temperature": 0, "max_output_tokens": 12}
        for path, more, known in (
            ("/v1/messages", {**body, "model": "default"}, False),
            ("/v1/messages", {**body, "model": "default", "rollout_id": "m"}, True),
            ("/v1/responses", spoken, False),
            ("/v1/responses", {**spoken, "include": ["message.output_text.logprobs"]}, True),
        ):
            status, answer = await gateway.post(path, more)
            assert status == 200, answer
            assert (answer["logprobs"] is not None) == known, path
        ids = {"token_ids": bare["prompt_token_ids"], "sampling_params": GREEDY}
        status, generated = await gateway.post(GENERATE, ids)
        assert (status, generated["choices"][0]["token_ids"]) == (200, bare["token_ids"])
        assert generated["choices"][0]["logprobs"] is None


async def test_the_likeliest_tokens_ranks_and_the_prompts_logprobs(config: Config, backend: HfBackend) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateTokensResponse,
        GenerateTokensStreamResponse,
    )

    prompt = [1, 2, 3, 40]
    async with serving(config, backend) as gateway:
        body: dict[str, Any] = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 6, "temperature": 2.0, "seed": 4, "logprobs": 3, "prompt_logprobs": 2},
        }
        status, answer = await gateway.post(GENERATE, body)
        assert status == 200, answer
        read = GenerateTokensResponse.model_validate(answer)
        content = (read.choices[0].logprobs and read.choices[0].logprobs.content) or []
        assert len(content) == 6
        for entry, sent in zip(content, answer["choices"][0]["logprobs"]["content"], strict=True):
            assert entry.top_logprobs[0].token_id == entry.token_id, "the sampled one first"
            assert len(entry.top_logprobs) == 3
            assert all(one["token"] == f"token_id:{one['token_id']}" for one in [sent, *sent["top_logprobs"]])
            others = [one.rank for one in entry.top_logprobs[1:]]
            assert others == sorted(rank for rank in range(1, 4) if rank != entry.rank)[: len(others)]
        assert any(entry.rank != 1 for entry in content), "not all of them were the likeliest"
        assert read.prompt_logprobs
        assert read.prompt_logprobs[0] is None
        assert all(one and token in one for token, one in zip(prompt[1:], read.prompt_logprobs[1:], strict=True))
        body["sampling_params"] = {**body["sampling_params"], "prompt_logprobs": None}
        events = [
            GenerateTokensStreamResponse.model_validate(event) for event in await streamed(gateway, GENERATE, body)
        ]
        parts = [choice.logprobs for event in events for choice in event.choices if choice.logprobs]
        assert [entry for part in parts for entry in part.content or []] == content

        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True}
        status, answer = await gateway.post("/v1/completions", asked)
        assert status == 200, answer
        [choice] = CompletionResponse.model_validate(answer).choices
        assert choice.logprobs
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(prompt) + 2
        assert (choice.logprobs.token_logprobs[0], choice.logprobs.top_logprobs[0]) == (None, None)
        own = [one.logprob for row in (read.prompt_logprobs or [])[1:] for one in list((row or {}).values())[:1]]
        assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(own, abs=1e-4)
        for value, top in zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True):
            assert value in (top or {}).values()
            assert 2 <= len(top or {}) <= 3
        status, answer = await gateway.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 1}
        )
        [choice] = CompletionResponse.model_validate(answer).choices
        assert choice.prompt_logprobs
        assert len(choice.prompt_logprobs) == len(prompt)

        client: Any = gateway.openai  # its types have no plain dicts
        chat = await client.chat.completions.create(
            model="default", messages=[USER], logprobs=True, top_logprobs=4, max_tokens=5, temperature=0
        )
        for one in chat.choices[0].logprobs.content:
            assert one.top_logprobs[0].token == one.token, "greedy"
            assert len(one.top_logprobs) == 4
        whole = await gateway.chat([USER], prompt_logprobs=0, **GREEDY)
        assert len(ChatCompletionResponse.model_validate(whole).prompt_logprobs or []) == len(whole["prompt_token_ids"])
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
        status, response = await gateway.post("/v1/responses", {"input": "a", **fields})
        assert status == 200, response
        entries = response["output"][0]["content"][0]["logprobs"]
        assert {len(entry["top_logprobs"]) for entry in entries} == {2}
        status, refused = await gateway.post("/v1/chat/completions", {"messages": [USER], "top_logprobs": 2})
        assert (status, refused["error"]["param"]) == (400, "top_logprobs")
