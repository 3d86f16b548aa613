"""Support for tests that run under sanitizers (`make test-sanitize`)."""

import os

import pytest


def not_sanitized(why: str) -> pytest.MarkDecorator:
    """Skips a test under a sanitizer whose runtime changes the tested behaviour."""
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    return pytest.mark.skipif(sanitized, reason=f"under a sanitizer {why}")
