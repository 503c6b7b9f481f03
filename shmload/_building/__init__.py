"""Models: their sizes before they exist, how they are built over segments, checks of the result.

Guarantee: the models are those that the libraries' own `from_pretrained` builds. May import the
core and `_devices`.
"""
