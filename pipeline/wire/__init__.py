"""What travels: messages, the names under which they lie in Redis, and the bytes of both.

messages ─▶ codec (msgpack, total decoding) ─▶ Redis, files      keys: names in Redis
tokens (arrays of one value per token) ◀─ sampled_tokens (a sequence's columns together)
"""
