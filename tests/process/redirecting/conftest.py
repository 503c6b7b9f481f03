"""Fixtures for redirected loads."""

from redirecting import ways  # noqa: F401 a fixture for all here
