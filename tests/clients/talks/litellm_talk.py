"""LiteLLM's completion call with tools, in a loop that its user writes."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network for prices when it is imported
import litellm

base_url, rollout_id, prompt = sys.argv[1:]
TOOLS = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": NUMBERS}} for name in TOOLS
]

messages = [{"role": "user", "content": prompt}]
for _ in range(4):
    answer = litellm.completion(
        "openai/policy", messages, base_url=base_url, api_key="none", tools=SCHEMAS, temperature=0.0, max_tokens=40,
        extra_headers={"X-Rollout-Id": rollout_id}, timeout=60, num_retries=0,
    )  # fmt: skip
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        result = TOOLS[call.function.name](*(json.loads(call.function.arguments)[name] for name in "ab"))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    if not message.tool_calls:
        break
print(json.dumps({"answer": messages[-1]["content"]}))
