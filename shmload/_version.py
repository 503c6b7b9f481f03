"""The version of shmload: the one of `pyproject.toml`."""

__version__ = "0.1.0"
