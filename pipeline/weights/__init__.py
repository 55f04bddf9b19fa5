"""Published weights: a directory a version, its manifest, and the registry in Redis (versions)."""
