"""A tool loop of the openai package over responses, streamed and not; it goes on from the stored conversation."""

import json
import sys
from typing import Any

from openai import OpenAI

base_url, rollout_id, prompt = sys.argv[1:]
RUN = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a // b,
}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "name": name, "parameters": NUMBERS, "strict": False} for name in RUN]

gateway = base_url.removesuffix("/v1")
client = OpenAI(base_url=f"{gateway}/rollouts/{rollout_id}/v1", api_key="none", max_retries=0, timeout=60)
asked: dict[str, Any] = {"input": prompt}
for turn in range(6):
    asked |= {"model": "policy", "max_output_tokens": 40, "tools": TOOLS}
    if turn % 2:
        with client.responses.stream(**asked) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    results = [(call.call_id, str(RUN[call.name](**json.loads(call.arguments)))) for call in calls]
    outputs = [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
    asked = {"input": outputs, "previous_response_id": answer.id}
print(json.dumps({"answer": answer.output_text}))
