"""The version of shmload, and the releases of the model libraries that the tests run with."""

__version__ = "0.1.0"

TESTED = {"diffusers": ("0.35", "0.42"), "transformers": ("4.57", "5.24")}
"""The oldest and the newest of each; a test compares the pins, `pyproject.toml` and the README."""
