"""What comes before any test module imports JAX: virtual devices, profiles, fixtures."""

import os

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

# XLA reads its flags once, when the CPU client starts: this has to come before the import of JAX.
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}=8".strip()
# pytest-xdist runs several processes; by default each would claim most of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile(
    "quick",
    max_examples=60,
    deadline=None,  # the first example of a shape compiles, the next does not
    database=None,
    derandomize="CI" in os.environ,
    print_blob=True,
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="module")
def x64():
    """64-bit dtypes for every test of the module that asks for it."""
    with jax.enable_x64(True):
        yield
