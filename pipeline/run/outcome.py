"""What an engine's result means: an answer to keep, a failure, or a cache entry to make anew."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.engines.supervisor import SetAside
from pipeline.errors import Failure, Reason, Stage
from pipeline.jobs import Request, Result

# written by the plugin's media connector in front of the reason
_BAD_ENTRY = re.compile(r"bad_cache_entry:([0-9a-f]{64}): ?(.*)")
_UNREACHABLE = "cache_unreachable:"


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """The engine refused cache entry `key`: quarantine it, encode again, ask again once."""

    request: Request
    key: str
    why: str

    def as_failure(self, attempts: int) -> Failure:
        """For a page whose entry is refused again after it was made anew."""
        return Failure(
            file=None,
            page=None,
            stage=Stage.STORE,
            reason=Reason.BAD_ENTRY,
            detail=f"cache entry {self.key}: {self.why}",
            custom_id=self.request.custom_id,
            attempts=attempts,
            retryable=True,
        )


def outcome_of(
    result: Result, request: Request, attempts: int, revision: str | None = None
) -> dict[str, Any] | Failure | DamagedEntry:
    """A result line (OpenAI batch output plus our `pipeline` object), or why there is none.

    `revision` is the commit of a hub model.
    """
    damaged = _BAD_ENTRY.search(result.error or "")
    if damaged:
        return DamagedEntry(request, damaged.group(1), damaged.group(2))
    if result.status_code != 200 or result.body is None:
        is_final = 400 <= result.status_code < 500 and _UNREACHABLE not in (result.error or "")
        reason = Reason.REJECTED if is_final else Reason.ENGINE_ERROR
        return _failure(request, reason, result.error or f"status {result.status_code}", attempts)
    choices = result.body.get("choices") or []
    # an engine's own error comes as a 200 with no tokens; it is not an empty page
    if not choices or any(choice.get("finish_reason") == "error" for choice in choices):
        return _failure(request, Reason.ENGINE_ERROR, "finish_reason is error", attempts)
    return {
        "id": f"batch_req_{request.identity[:24]}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": result.status_code,
            "request_id": result.request_id,
            "body": result.body,
        },
        "error": None,
        "pipeline": {
            "identity": request.identity,
            "attempts": attempts,
            "pages": [
                {"file": file, "page": page, "key": key}
                for (file, page), key in zip(request.pages, request.keys, strict=True)
            ],
            "flags": ["partial_page"] * request.partial,
            **({} if revision is None else {"revision": revision}),
        },
    }


def set_aside_failure(aside: SetAside, attempts: int) -> Failure:
    """The failure of a request that killed the engine each time it was alone in it."""
    detail = f"alone in the engine at {aside.deaths} deaths: {aside.cause}; log `{aside.log}`"
    return _failure(aside.request, Reason.ENGINE_DEATH, detail, attempts)


def _failure(request: Request, reason: Reason, detail: str, attempts: int) -> Failure:
    file, page = request.pages[0] if len(request.pages) == 1 else (None, None)
    return Failure(
        file=file,
        page=page,
        stage=Stage.ENGINE,
        reason=reason,
        detail=detail,
        custom_id=request.custom_id,
        attempts=attempts,
        retryable=reason is not Reason.REJECTED,
    )
