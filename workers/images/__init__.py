"""From an `ImageRef` to a decoded image, for jobs that name images instead of carrying them.

    ref ──▶ paths (below a root) ──┐
      └───▶ urls (listed hosts) ───┴─▶ bytes ─▶ digests ─▶ pixels (safe decode) ─▶ cache ─▶ RGB image

The references come from whoever may write to the queue, the bytes from anywhere: neither is trusted.
"""

from workers.images.pixels import open_image
from workers.images.store import ImageStore

__all__ = ["ImageStore", "open_image"]
