"""From an `ImageRef` to a decoded image, for jobs that reference images instead of carrying them.

    ref ──▶ paths (below a root) ──┐
      └───▶ urls (listed hosts) ───┴─▶ bytes ─▶ digest ─▶ decoders ═▶ pixels ═▶ cache ─▶ RGB image
                                                             (═ a separate process)
    prompt, RGB images ─▶ processor ─▶ expanded token ids, token types, pixel values (numpy)
                                                                           └─▶ features ─▶ the model's forward pass

- References come from anyone who may write to the queue, bytes from anywhere: neither is trusted.
- Workers, scorers, the trainer and the offline engine enter through `store.ImageStore`; the last one's caller may also
  give it files from anywhere, or bytes (`decoders.load_image`).
- What an image becomes in a prompt is decided in `processor` alone, for all of them.
"""
