"""An agent of smolagents: its own prompts, its own way to tell of errors; it knows of rollouts by its base URL."""

import json
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent

base_url, kind, prompt = sys.argv[1:]
model = OpenAIServerModel("policy", api_base=base_url, api_key="none", client_kwargs={"max_retries": 0, "timeout": 60})
agent = {"code": CodeAgent, "calls": ToolCallingAgent}[kind](tools=[], model=model, max_steps=2, verbosity_level=0)
print(json.dumps({"answer": str(agent.run(prompt))}))
