"""What is asked of a decoding process, and what it may take for it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.keys import RenderSpec
from pipeline.pages.records import SourceFile, Wanted


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """The pages of a file that are wanted, None for all; `passwords` are tried if it has one."""

    file: SourceFile
    render: RenderSpec
    only: Wanted | None = None
    passwords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What one decoding process may take: memory of its own, and seconds for each page."""

    memory_bytes: int = 2 << 30
    page_s: float = 60.0


DEFAULT_LIMITS = DecodeLimits()
