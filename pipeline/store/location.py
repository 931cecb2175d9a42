"""Where a cache lies: a directory, or a URL, then with a read-through tier on the local disk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.errors import UsageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_EXAMPLE = "give one like `s3://bucket/prefix`, or a directory"


@dataclass(frozen=True, slots=True)
class Tier:
    """A directory that keeps up to `max_bytes` of what was read from a cache elsewhere."""

    directory: Path
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Remote:
    """A cache in an object store, or on whatever else fsspec opens; no slash ends its `url`."""

    url: str
    tier: Tier | None = None

    def __str__(self) -> str:
        return self.url


Location = Path | Remote


def location_of(text: str | os.PathLike[str] | Remote) -> Location:
    """What `--cache` names: a path or a URL; a `file://` URL is the path.

    Raises UsageError for a URL that can't name a cache.
    """
    if isinstance(text, Remote):
        return text
    text = os.fspath(text)
    found = _URL.fullmatch(text)
    if found is None and "://" in text:
        raise UsageError(f"`{text}` names no single place for a cache", _EXAMPLE)
    if found is not None and found[1].lower() != "file":
        return Remote(_url(text, found[1].lower(), found[2].rstrip("/")))
    return Path(text) if found is None else _path_of(text)


def with_tier(location: Location, directory: Path | None, max_bytes: int | None) -> Location:
    """The same with a read-through tier; raises UsageError where that can't be."""
    if directory is None and max_bytes is None:
        return location
    if directory is None or max_bytes is None:
        raise UsageError(
            "a local tier needs both `--cache-local DIR` and `--cache-local-bytes SIZE`",
            "give both, or neither",
        )
    if isinstance(location, Path):
        raise UsageError(
            f"`--cache-local` is for a cache elsewhere, and `{location}` is a directory",
            "leave out `--cache-local`",
        )
    return replace(location, tier=Tier(directory, max_bytes))


def _url(text: str, scheme: str, rest: str) -> str:
    # `.` and `..` are plain names in a bucket, but HTTP clients resolve them: keys outside it
    if not rest or {"", ".", ".."} & set(rest.split("/")):
        raise UsageError(f"`{text}` names no place for a cache", _EXAMPLE)
    if scheme in ("http", "https"):
        raise UsageError(f"a cache at `{text}` could only be read", _EXAMPLE)
    return f"{scheme}://{rest}"


def _path_of(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError(f"`{text}` names no directory of this machine", _EXAMPLE)
    return Path(unquote(parts.path))


def address_of(location: Location) -> str:
    """The same place, however the working directory changes."""
    return str(location.resolve()) if isinstance(location, Path) else location.url
