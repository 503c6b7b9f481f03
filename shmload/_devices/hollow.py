"""Models over hollow segments: files with a header and no data, which comes through a ring."""


class BytesNeeded(Exception):
    """Raised when a model cannot be built over hollow segments: something reads its weights.

    Its text is that of the error that followed; empty if none did.
    """
