"""Pixels to patch tokens: a codebook of small patches, fitted on the train digits only.

- A canvas becomes one token per patch, column by column and top down: a digit's patches are close together
  in the prompt.
- The codebook is deterministic: k-means with a fixed seed over the aligned patches of the train digits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

_SINGLE: Any = 1  # scikit-learn types n_init as a string

PATCH_HEIGHT, PATCH_WIDTH = 2, 2
NUM_PATCHES = 48
"""Size of the codebook."""


def cut(pixels: np.ndarray) -> np.ndarray:
    """Pixels [..., H, W] as float32 [..., patches, pixels per patch], column by column, top down."""
    *batch, height, width = pixels.shape
    rows, columns = height // PATCH_HEIGHT, width // PATCH_WIDTH
    tiles = pixels.reshape(*batch, rows, PATCH_HEIGHT, columns, PATCH_WIDTH)
    tiles = np.moveaxis(tiles, -2, -4)
    return tiles.reshape(*batch, rows * columns, PATCH_HEIGHT * PATCH_WIDTH).astype(np.float32)


@functools.cache
def codebook() -> np.ndarray:
    """Patch centroids, float32 [NUM_PATCHES, pixels per patch], ordered by mean brightness."""
    data: Any = load_digits()
    images = data.images
    train = images[np.arange(len(images)) % 5 != 4]
    patches = cut(train).reshape(-1, PATCH_HEIGHT * PATCH_WIDTH)
    centroids = KMeans(NUM_PATCHES, n_init=_SINGLE, random_state=0).fit(patches).cluster_centers_
    order = np.lexsort((*centroids.T, centroids.mean(axis=1)))
    return centroids[order].astype(np.float32)


def patch_ids(pixels: np.ndarray) -> np.ndarray:
    """The nearest codebook entry of each patch, int64 [patches], for pixels [H, W]."""
    distances = ((cut(pixels)[:, None, :] - codebook()[None]) ** 2).sum(-1)
    return distances.argmin(-1)


def patch_token(index: int) -> str:
    """The text of one patch token."""
    return f"<|patch_{index}|>"


def patch_text(pixels: np.ndarray) -> str:
    """A canvas as prompt text: `<|patch_3|><|patch_0|>...`."""
    return "".join(patch_token(int(index)) for index in patch_ids(pixels))
