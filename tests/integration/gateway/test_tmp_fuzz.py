from __future__ import annotations
import copy, json, random
from typing import Any
from tests.integration.gateway.harness import USER, serving
from tests.integration.gateway.test_gateway_chat import *  # noqa

ODD = [None, True, 0, -1, 1.5, 2**70, "", "x", "\ud800", [], [1], {}, {"a": 1}, [{}], [{"type": "text"}], [{"type":"text","text":"\ud800"}], [{"type":"image_url","image_url":{"url":"http://[::1"}}], [None], ["a"], 1e300]

async def test_fuzz(config: Any) -> None:
    rng = random.Random(0)
    names = list(ChatRequestFields) 
    seen: dict[Any, int] = {}
    async with serving(with_gateway(config, request_timeout_s=0.05), None) as gateway:
        async def send(path: str, body: Any) -> None:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with gateway.http.post(gateway.url + path, data=raw, headers={"content-type": "application/json"}) as a:
                text = await a.text()
                seen[(path, a.status)] = seen.get((path, a.status), 0) + 1
                
                if a.status == 500: print("FAULT", path, raw[:300], text)
        for _ in range(700):
            body: dict[str, Any] = {"messages": [dict(USER)]}
            for name in rng.sample(names, rng.randint(1, 2)):
                body[name] = copy.deepcopy(rng.choice(ODD))
            if rng.random() < 0.5:
                message = body["messages"][0] if isinstance(body.get("messages"), list) and body["messages"] and isinstance(body["messages"][0], dict) else {}
                message[rng.choice(["role", "content", "tool_calls", "tool_call_id", "name", "extra"])] = copy.deepcopy(rng.choice(ODD))
            await send("/v1/chat/completions", body)
        for _ in range(200):
            r: dict[str, Any] = {"messages": [dict(USER)]}
            r[rng.choice(["messages", "images", "videos", "uuid", "tools"])] = copy.deepcopy(rng.choice(ODD))
            b: dict[str, Any] = {"infer_requests": [r]}
            if rng.random() < .5:
                b["request_config"] = {rng.choice(["seed", "stop", "max_tokens", "top_p", "temperature", "n"]): copy.deepcopy(rng.choice(ODD))}
            await send("/infer/", b)
        for _ in range(200):
            await send(f"/v1/rollout/{rng.choice(['a','%2F','%00','é','x'*300])}/finish", {"final_status": rng.choice(["COMPLETED","ERROR"]), rng.choice(["reward","truth"]): copy.deepcopy(rng.choice(ODD))})
        for raw in (b"", b"[]", b"{", b"\xff", b'"a"', b"[" * 100000, b'{"messages":' * 5000, b"NaN", b'{"messages":[{"role":"user","content":NaN}]}'):
            for path in ("/v1/chat/completions", "/infer/", "/v1/rollout/a/finish", "/v1/rollout/completed"):
                await send(path, raw)
    print(seen)

from producers.gateway.requests import ChatRequest, _NEUTRAL
ChatRequestFields = [*ChatRequest.model_fields, *_NEUTRAL]
