"""Open the file system of a URL, and say in words what can go wrong with it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import MissingExtraError, StoreError, UsageError

_CONNECT_S, _READ_S = 10, 60
_ATTEMPTS = 5  # of each request, with exponential backoff: botocore's own
_RECONNECTIONS = 3  # s3fs's own, around those: for answers that break off half-way
_DENIED = "check the credentials; a cache needs to list, read, write and delete below its URL"
_UNREACHABLE = (
    "check the URL, the network and `AWS_ENDPOINT_URL`; what is finished stays, and the same "
    "command goes on from there"
)


def open_file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for `url`, and the path there; connects to nothing.

    Raises MissingExtraError if the package that opens it is not installed, UsageError for a
    scheme that nobody knows.
    """
    scheme = url.partition("://")[0]
    is_s3 = scheme in ("s3", "s3a")
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        import fsspec

        file_system, path = fsspec.url_to_fs(url, **options | (_s3_options() if is_s3 else {}))
    except ImportError as error:
        hint = "pip install 'vlm-page-pipeline[s3]'" if is_s3 else "install what is named there"
        raise MissingExtraError(f"no file system opens `{url}`: {_why(error)}", hint) from error
    except ValueError as error:
        hint = "give one like `s3://bucket/prefix`, or a directory"
        raise UsageError(f"no file system opens `{url}`: {_why(error)}", hint) from error
    if is_s3:
        file_system.retries = _RECONNECTIONS
    return file_system, str(path).rstrip("/")


def _s3_options() -> dict[str, Any]:
    config: dict[str, Any] = {
        "connect_timeout": _CONNECT_S,
        "read_timeout": _READ_S,
        "response_checksum_validation": "when_required",  # entries carry a digest of their own
    }
    if not {"AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"} & set(os.environ):
        config["retries"] = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
    # concurrent parts would cost a request more for each page, and mix two writers' bytes
    return {"config_kwargs": config, "max_concurrency": 1}


@contextmanager
def told(doing: str, address: str) -> Iterator[None]:
    """Turn what a file system raises into a StoreError that names `address`.

    What is missing, or there already, stays FileNotFoundError or FileExistsError.
    """
    try:
        yield
    except (StoreError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if code_of(error) == "NoSuchBucket":
            hint = "make it, or check its name and `AWS_ENDPOINT_URL`"
            raise StoreError(f"there is no such bucket: `{address}`", hint) from error
        raise
    except PermissionError as error:
        raise StoreError(f"access to `{address}` is denied: {_why(error)}", _DENIED) from error
    except Exception as error:  # whatever a file system, its HTTP client or its log-in raises
        if "Credential" in type(error).__name__ or "Token" in type(error).__name__:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            raise StoreError(f"no credentials for `{address}`: {_why(error)}", hint) from error
        raise StoreError(f"can't {doing} `{address}`: {_why(error)}", _UNREACHABLE) from error


def code_of(error: BaseException) -> str:
    """The server's own code for what went wrong; empty where it gave none."""
    for each in (error, error.__cause__, error.__context__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def is_unsupported(error: Exception) -> bool:
    """True if a file system or server does not know what it was asked for."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSYS or code_of(error) == "NotImplemented"
    return isinstance(error, (NotImplementedError, TypeError))


def _why(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
