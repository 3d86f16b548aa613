"""The cache of compiled code, in memory and on disk."""

import contextlib
import functools
import hashlib
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from jax_oneflow_ops import _native
from jax_oneflow_ops._codegen.compilers import (
    CompilerMissingError,
    CppCompiler,
    Nvrtc,
    cuda_architecture,
)

_VARIABLE = "JAX_ONEFLOW_OPS_CACHE_DIR"


def code(source: str, platform: str, *, is_narrow: bool = False, contracts: bool = True) -> bytes:
    """Compiles a source for the local devices of a platform, "cpu" or "cuda", or reads the cache.

    `is_narrow`: all results have 16 bits or fewer, so that GPUs may divide within 2 ulp.
    `contracts`: a product and a sum may be contracted to one operation, which rounds once.

    Raises:
      CompilerError: the source is wrong.
      CompilerMissingError: there is no compiler, and the cache has no code of any compiler.
    """
    compiler: CppCompiler | Nvrtc = (
        CppCompiler(contracts)
        if platform == "cpu"
        else Nvrtc(cuda_architecture(), is_narrow, contracts)
    )
    key = _key(source, *compiler.target, *compiler.identity)
    with _locks_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _compiled:
            folder = cache_folder()
            found = None if folder is None else read(folder, key)
            if found is None:
                # A second entry does not name the compiler. It is used when there is no compiler.
                of_any = f"{_key(source, *compiler.target)}.any"
                try:
                    found = compiler.compile(source)
                except CompilerMissingError:
                    found = None if folder is None else read(folder, of_any)
                    if found is None:
                        raise
                else:
                    if folder is not None:
                        write(folder, key, found)
                        write(folder, of_any, found)
            _compiled[key] = found
        return _compiled[key]


def code_or_fallback(function: str, what: str, *args: Any, **options: Any) -> bytes | None:
    """Like `code`, but returns None if there is no compiler, and warns that `what` runs."""
    try:
        return code(*args, **options)
    except CompilerMissingError as error:
        if _native.choose_implementation(function, None) == "native":
            raise NotImplementedError(
                f'{function}: implementation="native" was asked for, but {error}.'
            ) from error
        _native.warn_of_fallback(what, f"{error}.")
        return None


# The code that this process has compiled or read, by key.
_compiled: dict[str, bytes] = {}
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


def code_id(code: bytes) -> int:
    """The hash that identifies code to the FFI handlers."""
    return int.from_bytes(hashlib.sha256(code).digest()[:8], "little", signed=True)


# ---- the cache on disk ----

# An entry consists of this prefix, the SHA-256 of the code, and the code.
_MAGIC = b"jax_oneflow_ops kernel 1\n"


def cache_folder() -> Path | None:
    """The folder of compiled kernels: $JAX_ONEFLOW_OPS_CACHE_DIR, or the platform's cache folder.

    None if the user has no home directory.
    """
    try:
        if chosen := os.environ.get(_VARIABLE):
            return Path(chosen).expanduser().absolute()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "jax_oneflow_ops"
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jax_oneflow_ops"
    except RuntimeError:
        return None


def _key(*parts: str) -> str:
    every = (_MAGIC.decode(), _headers_hash(), *parts)
    return hashlib.sha256("\0".join(every).encode()).hexdigest()


@functools.cache
def _headers_hash() -> str:
    """A hash of the package's version and of every header that a source may include."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("jax-oneflow-ops").encode())
    root = Path(_native.include_dir())
    for path in sorted(root.rglob("*.*h")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_private(status: os.stat_result) -> bool:
    """Whether only this user or root can write the file or folder, whose content runs as code."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(folder: Path, key: str) -> bytes | None:
    """Reads an entry; None unless it exists, is complete and is private to this user."""
    with contextlib.suppress(OSError):
        if not _is_private(os.stat(folder)):
            return None
        # O_NONBLOCK: opening a pipe would block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(folder / key, flags)
        with open(file, "rb") as entry:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                return None
            content = entry.read()
        head, code = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if code and head == _MAGIC + hashlib.sha256(code).digest():
            return code
    return None


def write(folder: Path, key: str, code: bytes) -> None:
    """Writes an entry atomically; does nothing if that is not possible."""
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.stat(folder)):
            return
        file, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        with open(file, "wb") as entry:
            entry.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.replace(temporary, folder / key)
    except OSError:  # read-only, or full
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
