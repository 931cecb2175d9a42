"""Job lines become requests whose images are references into the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.encode import Located
from pipeline.errors import Failure, Reason, Stage
from pipeline.jobs import JobLine, Request, inline_embedding_bytes, with_embeddings
from pipeline.keys import canonical_json
from pipeline.run.images import OpenPages
from pipeline.run.survey import JobSource

Images = Mapping[tuple[Path, int], Located | Failure]


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Turns lines into requests: `images` says what became of each page.

    `inline_faults` holds, by custom_id, what is wrong with embeddings that lines bring along.
    """

    source: JobSource
    images: Images
    served_names: tuple[str, ...]
    pages: OpenPages
    inline_faults: Mapping[str, str] = field(default_factory=dict)

    def requests(self) -> Iterator[Request | Failure]:
        """One per line of the job, in its order; what is wrong with a line comes as a Failure."""
        for line in self.source.lines():
            yield line if isinstance(line, Failure) else self._request(line)

    def _request(self, line: JobLine) -> Request | Failure:
        model = line.body.get("model", self.served_names[0])
        if model not in self.served_names:
            return self._failure(
                line, f"model {model!r} is not the one this run serves ({self.served_names[0]!r})"
            )
        if (fault := self.inline_faults.get(line.custom_id)) is not None:
            return self._failure(line, fault, Reason.BAD_EMBEDDING)
        located: list[Located] = []
        for image in line.images:
            found = self.images[image.path, image.page]
            if isinstance(found, Failure):
                return _of_line(found, line)
            located.append(found)
        footers = [found.footer for found in located]
        keys = tuple(footer.key for footer in footers)
        parts = [self.pages.reference_part(footer) for footer in footers]
        return Request(
            custom_id=line.custom_id,
            url=line.url,
            body=with_embeddings(line, parts, self.served_names[0]),
            identity=self._identity(line, keys),
            keys=keys,
            pages=tuple((str(image.path), image.page) for image in line.images),
            embedding_bytes=inline_embedding_bytes(line.body)
            + sum(footer.embedding_bytes for footer in footers),
            partial=any(found.partial for found in located),
        )

    def _identity(self, line: JobLine, keys: tuple[str, ...]) -> str:
        """Digest of all that the answer depends on; sampling defaults are in the model's."""
        return hashlib.sha256(
            canonical_json([line.url, line.body, list(keys), self.pages.model_identity])
        ).hexdigest()

    def _failure(self, line: JobLine, detail: str, reason: Reason = Reason.BAD_FIELD) -> Failure:
        return Failure(
            file=str(self.source.path),
            page=None,
            stage=Stage.VALIDATE,
            reason=reason,
            detail=f"{self.source.path}:{line.line_number}: {detail}",
            custom_id=line.custom_id,
        )


def _of_line(failure: Failure, line: JobLine) -> Failure:
    """The page's failure as that of the request that needs the page."""
    return Failure(
        file=failure.file,
        page=failure.page,
        stage=failure.stage,
        reason=failure.reason,
        detail=failure.detail,
        custom_id=line.custom_id,
        attempts=failure.attempts,
        retryable=failure.retryable,
    )
