"""The main job from nothing: tiny models that learn to read digits, to add by steps, and to call tools."""
