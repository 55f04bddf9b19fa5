"""Published weights: a directory a version, its manifest, and the registry in Redis (versions).

agreement: when two passes of one model over the same tokens agree, which every proof of a model asks.
"""
