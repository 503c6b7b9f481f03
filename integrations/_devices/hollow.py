"""Models over hollow segments: files that have a header and whose tensors come later, by a ring."""


class BytesNeeded(Exception):
    """Raised when a model cannot be built over hollow segments: something reads its weights."""
