"""The gateway's routes: each API reads its requests, makes the gateway's calls of them, and writes the answers.

| routes                                              | module                                   |
|-----------------------------------------------------|------------------------------------------|
| `/v1/chat/completions`, `/v1/models`                | chat_completions                         |
| `/v1/messages`, `/v1/messages/count_tokens`         | messages (Anthropic's)                   |
| `/v1/responses`                                     | responses (OpenAI's)                     |
| `/v1/completions`                                   | completions                              |
| `/inference/v1/generate`, `/tokenize`, `/detokenize` | tokens (vLLM's)                          |
| `/infer/`                                           | infer                                    |
| `/v1/rollouts`, `/v1/rollout/…/finish`, `…/completed` | rollouts                                 |

| shared   |                                                                          |
|----------|--------------------------------------------------------------------------|
| fields   | which fields are served, and every field that is not, with its reason    |
| requests | sampling options, formats and messages, as several APIs have them        |
| openapi  | examples and answers, for the page at /docs                              |

Most routes are there again under `/rollouts/{rollout_id}`, for agents whose only setting is a base URL.
"""
