"""Names below a cache, as paths from its root: the same on a disk and in an object store."""

from __future__ import annotations

FORMAT_VERSION = 1
VERSION = f"v{FORMAT_VERSION}"  # where entries and manifests of this format lie
DOCUMENTS = "documents"
QUARANTINE = "quarantine"
RUNS = "runs"
LOCK = "lock"


def entry_name(tower_fingerprint: str, key: str) -> str:
    """Where the entry of `key` lies or would lie."""
    return f"{VERSION}/{tower_fingerprint}/{key[:2]}/{key}.parquet"


def manifest_name(file_digest: str, render_digest: str) -> str:
    """Where the manifest of a file with these bytes, rendered so, lies or would lie."""
    return f"{VERSION}/{DOCUMENTS}/{file_digest[:2]}/{file_digest}-{render_digest}.json"


def whole_name(name: str) -> str:
    """The path from the root of what is named from the version directory."""
    return f"{VERSION}/{name}"
