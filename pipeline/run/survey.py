"""The whole job file is read once before anything starts: what it needs, what is wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import Failure
from pipeline.jobs import ImageReference, JobLine, inline_embedding_bytes, read_job
from pipeline.journal import write_atomically


@dataclass(frozen=True, slots=True)
class JobSource:
    """Where the lines come from and how their paths resolve.

    With `only`, lines of other custom_ids are passed over; those in `beyond` always are.
    """

    path: Path
    base: Path | None
    roots: tuple[Path, ...]
    attachments: Path
    only: frozenset[str] | None = None
    beyond: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, job: Path, base: Path | None, roots: tuple[Path, ...], attachments: Path
    ) -> JobSource:
        """With the defaults: paths start at the job file, and stay below it or the project.

        The current directory is the project if the job lies in it; the file system's root and
        the home directory are no project, or a job run from there could read everything.
        """
        start = (base or job.parent).resolve()
        here = Path.cwd()
        is_project = start.is_relative_to(here) and here not in (Path(here.anchor), Path.home())
        return cls(job, start, roots or ((start, here) if is_project else (start,)), attachments)

    def lines(self) -> Iterator[JobLine | Failure]:
        """Read the job file once more, a line at a time."""
        found = read_job(self.path, base=self.base, roots=self.roots, attachments=self.attachments)
        for line in found:
            name = line.custom_id
            if name not in self.beyond and (self.only is None or name in self.only):
                yield line


@dataclass(frozen=True, slots=True)
class Survey:
    """What a job file holds; `images` are distinct, in order of first use.

    `brings_embeddings` tells whether a line has `image_embeds` parts of its own.
    """

    requests: int
    images: tuple[ImageReference, ...]
    model_names: tuple[str, ...]
    failures: tuple[Failure, ...]
    brings_embeddings: bool = False


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    images: dict[ImageReference, None] = field(default_factory=dict)
    model_names: dict[str, None] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    brings_embeddings: bool = False


def survey_job(source: JobSource) -> Survey:
    """Validate every line; pictures given as `data:` urls are kept as files on the way."""
    tally = _Tally()
    for line in source.lines():
        tally.requests += 1
        if isinstance(line, Failure):
            tally.failures.append(line)
            continue
        model = line.body.get("model")
        if isinstance(model, str):
            tally.model_names[model] = None
        tally.brings_embeddings |= inline_embedding_bytes(line.body) > 0
        for image in line.images:
            tally.images[_kept(image)] = None
    return Survey(
        tally.requests,
        tuple(tally.images),
        tuple(tally.model_names),
        tuple(tally.failures),
        tally.brings_embeddings,
    )


def _kept(image: ImageReference) -> ImageReference:
    """The reference without its bytes; they lie at its path, named by their content."""
    if image.data is None:
        return image
    if not image.path.exists():
        image.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(image.path, [image.data])
    return ImageReference(image.path, image.page)
