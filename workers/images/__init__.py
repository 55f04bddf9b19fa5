"""From an `ImageRef` to a decoded image, for jobs that name images instead of carrying them.

    ref ──▶ paths (below a root) ──┐
      └───▶ urls (listed hosts) ───┴─▶ bytes ─▶ digest ─▶ decoders ═▶ pixels ═▶ cache ─▶ RGB image
                                                             (═ a process of its own)

- The references come from whoever may write to the queue, the bytes from anywhere: neither is trusted.
- `store.ImageStore` is the queue worker's way in, `decoders.load_image` that of the offline engine.
"""
