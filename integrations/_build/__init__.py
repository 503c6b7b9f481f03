"""Building a pipeline over its segments: from a view, or from a skeleton, and the checks afterwards.

Guarantee: the models are those that the libraries' own `from_pretrained` builds. May import the
core.
"""
