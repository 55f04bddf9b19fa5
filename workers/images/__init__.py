"""From an `ImageRef` to a decoded image, for jobs that reference images instead of carrying them.

    ref ──▶ paths (below a root) ──┐
      └───▶ urls (listed hosts) ───┴─▶ bytes ─▶ digest ─▶ decoders ═▶ pixels ═▶ cache ─▶ RGB image
                                                             (═ a separate process)

- References come from anyone who may write to the queue, bytes from anywhere: neither is trusted.
- The queue worker enters through `store.ImageStore`, the offline engine through `decoders.load_image`.
"""
