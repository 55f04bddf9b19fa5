"""The main job from nothing: a tiny model that learns to read handwritten digits from its own rollouts."""
