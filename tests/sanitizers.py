"""What tests know of the sanitizers that a process may run under (`make test-sanitize`)."""

import os

import pytest


def not_sanitized(why: str) -> pytest.MarkDecorator:
    """For tests of what a sanitizer's runtime changes."""
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    return pytest.mark.skipif(sanitized, reason=f"under a sanitizer {why}")
