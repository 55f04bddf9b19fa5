"""What travels: messages, the names under which they lie in Redis, and the bytes of both.

messages ─▶ codec (msgpack, total decoding) ─▶ Redis, files      tokens: per-token columns      keys: names in Redis
"""
