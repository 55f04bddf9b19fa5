"""A tool loop of the anthropic package, streamed and not; it knows of rollouts by its base URL."""

import json
import sys
from typing import Any

from anthropic import Anthropic

base_url, rollout_id, prompt = sys.argv[1:]
RUN = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a // b,
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [{"name": name, "description": name, "input_schema": NUMBERS} for name in RUN]

gateway = base_url.removesuffix("/v1")
client = Anthropic(base_url=f"{gateway}/rollouts/{rollout_id}", api_key="none", max_retries=0, timeout=60)
messages: list[Any] = [{"role": "user", "content": prompt}]
for turn in range(6):
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 40, "messages": messages, "tools": TOOLS}
    if turn % 2:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": answer.content})
    if answer.stop_reason != "tool_use":
        break
    used = [block for block in answer.content if block.type == "tool_use"]
    results = [(block.id, str(RUN[block.name](**block.input))) for block in used]
    messages.append(
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results],
        }
    )
print(json.dumps({"answer": "".join(block.text for block in answer.content[-1:] if block.type == "text")}))
