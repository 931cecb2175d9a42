"""A golden set: pages, prompt, answers and embeddings as they were, to be checked again before an
upgrade of vLLM, of transformers or of the checkpoint.

    DIR/golden.json     settings, versions, pages with keys and digests, answers token by token
    DIR/pages/          the page files
    DIR/entries/        the cache entry of each page, in the cache's own layout

A check encodes the same pages again, with an empty cache, and asks the same questions.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.config import EngineOptions, vllm_version
from pipeline.encode import EncodeReport, GoodPage, encode_pages
from pipeline.errors import Failure, PipelineError, StoreError, UsageError
from pipeline.pages import discover
from pipeline.parity.answers import Answer, Difference, ask, difference
from pipeline.parity.compare import lowest_cosine
from pipeline.parity.questions import SERVED_NAME, Asking, cached_requests, questions
from pipeline.run.apart import call_apart
from pipeline.run.images import PageOptions, open_pages
from pipeline.store import Entry, Store
from pipeline.store.files import write_whole

FORMAT_VERSION = 1
EXACT = 0.99999  # rows of an unchanged tower agree at least so far


@dataclass(frozen=True, slots=True)
class GoldenOptions:
    """How the set in `directory` is made or checked; `pages.cache` is not used."""

    directory: Path
    pages: PageOptions
    engine: EngineOptions
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class PageCheck:
    """A golden page encoded anew: the lowest cosine of its rows to the golden ones.

    None where the shapes differ, or where the page can't be encoded any more.
    """

    file: str
    page: int
    cosine: float | None
    same_bytes: bool

    @property
    def good(self) -> bool:
        """True if the embedding is still the golden one, up to rounding."""
        return self.cosine is not None and self.cosine >= EXACT


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """What a check found; `then` and `now` are versions."""

    requests: int
    pages: tuple[PageCheck, ...]
    different: tuple[Difference, ...]
    then: dict[str, Any]
    now: dict[str, Any]

    @property
    def good(self) -> bool:
        """True if answers and embeddings are those of the golden set."""
        return not self.different and all(page.good for page in self.pages)

    def as_record(self) -> dict[str, Any]:
        """The `golden check --json` record."""
        cosines = [page.cosine for page in self.pages if page.cosine is not None]
        return {
            "requests": self.requests,
            "identical": self.requests - len(self.different),
            "different": [
                {"golden" if name == "native" else "now" if name == "cached" else name: value
                 for name, value in asdict(each).items() if name != "engine"}
                for each in self.different
            ],
            "pages": [asdict(page) for page in self.pages],
            "cosine_min": min(cosines, default=None),
            "then": self.then,
            "now": self.now,
        }  # fmt: skip


def record(options: GoldenOptions, paths: Iterable[Path], asking: Asking) -> GoldenReport:
    """Make a golden set of the pages in `paths`; its directory must not exist yet.

    Raises UsageError if it does, PipelineError if a page can't be encoded or answered.
    """
    if options.directory.exists():
        raise UsageError(
            f"`{options.directory}` is there already", "give a new name, or remove it first"
        )
    beside = options.directory.with_name(f".{options.directory.name}.making")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        _copy_pages(paths, beside / "pages")
        found = _observe(replace(options, directory=beside), asking, beside / "entries")
        golden = {
            "format_version": FORMAT_VERSION,
            "asking": asdict(asking),
            "settings": _settings(options),
            "versions": found.versions,
            "pages": [
                {"file": page.path.name, "page": page.page, "paged": page.paged, "key": page.key}
                for page in found.good
            ],
            "answers": {name: asdict(answer) for name, answer in found.answers.items()},
        }
        write_whole(beside / "golden.json", json.dumps(golden, indent=1).encode())
        beside.rename(options.directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    pages = tuple(PageCheck(page.path.name, page.page, 1.0, True) for page in found.good)
    return GoldenReport(len(found.answers), pages, (), found.versions, found.versions)


def check(options: GoldenOptions) -> GoldenReport:
    """Encode and ask again, and compare with the golden set.

    Raises PipelineError for a directory that holds no golden set.
    """
    golden = _read(options.directory)
    asking = Asking(**golden["asking"])
    with tempfile.TemporaryDirectory(prefix="golden-") as work:
        found = _observe(_as_recorded(options, golden), asking, Path(work) / "cache", strict=False)
        pages = tuple(_page_check(page, found) for page in golden["pages"])
    answers = {
        name: Answer(
            text=answer["text"],
            token_ids=tuple(answer["token_ids"]),
            top_two=tuple(map(tuple, answer["top_two"])),
        )
        for name, answer in golden["answers"].items()
    }
    missing = Answer("", (), ())
    different = tuple(
        part
        for name, answer in answers.items()
        if (part := difference(name, answer, found.answers.get(name, missing), "llm")) is not None
    )
    return GoldenReport(len(answers), pages, different, golden["versions"], found.versions)


# -- what is seen now ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Observed:
    good: tuple[GoodPage, ...]
    answers: dict[str, Answer]
    versions: dict[str, Any]
    cosines: dict[tuple[str, int], tuple[float | None, bool]]


def _observe(
    options: GoldenOptions, asking: Asking, cache: Path, *, strict: bool = True
) -> _Observed:
    """Encode the pages of a golden directory into an empty cache, and ask about each."""
    page_options = replace(options.pages, cache=cache)
    golden = None if strict else options.directory / "entries"
    report, cosines = call_apart(_encode, options.directory / "pages", page_options, golden)
    if strict and (report.failures or not report.good):
        raise _refusal(report.failures)
    pages = open_pages(page_options)
    asked = questions(report.good, base=options.directory / "pages")
    with tempfile.TemporaryDirectory(prefix="golden-engine-") as work:
        largest = max((page.tokens for page in report.good), default=0)
        answers = ask(
            replace(pages.engine_source((SERVED_NAME,)), largest_page_tokens=largest),
            options.engine,
            cached_requests(asked, asking, pages),
            Path(work),
            name="cached embeddings, tower absent",
            total=len(asked),
            quiet=options.quiet,
        )
    target = pages.target
    versions = {
        "pipeline": __version__,
        "vllm": vllm_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "model": target.model.name,
        "revision": target.model.revision,
        "model_identity": pages.model_identity,
        "tower_fingerprint": target.store.tower_fingerprint,
    }
    return _Observed(report.good, answers, versions, cosines)


def _encode(
    directory: Path, options: PageOptions, golden: Path | None
) -> tuple[EncodeReport, dict[tuple[str, int], tuple[float | None, bool]]]:
    target = options.target()
    report = encode_pages([directory], target)
    cosines = {}
    for page in report.good if golden else ():
        assert golden is not None
        cosines[page.path.name, page.page] = _against(golden, directory, target.store, page)
    return report, cosines


def _against(
    golden: Path, directory: Path, store: Store, page: GoodPage
) -> tuple[float | None, bool]:
    """Lowest cosine of a page's rows to the golden ones, and whether their bytes are equal."""
    places = _read(directory.parent)["pages"]
    keys = {(each["file"], each["page"]): each["key"] for each in places}
    key = keys.get((page.path.name, page.page))
    found = list(golden.glob(f"v*/*/*/{key}.parquet")) if key else []
    if not found:
        return None, False
    then = Store(golden, found[0].parent.parent.name).get(str(key))
    now = store.get(page.key)
    if not isinstance(then, Entry):
        raise StoreError(f"golden entry {str(key)[:12]}… is bad: {then.why}", "record it again")
    if not isinstance(now, Entry) or then.bits().shape != now.bits().shape:
        return None, False
    same = (bytes(then.high), bytes(then.low)) == (bytes(now.high), bytes(now.low))
    return lowest_cosine(then.tensor(), now.tensor()), same


def _page_check(page: dict[str, Any], found: _Observed) -> PageCheck:
    cosine, same = found.cosines.get((page["file"], page["page"]), (None, False))
    return PageCheck(page["file"], page["page"], cosine, same)


# -- the directory ------------------------------------------------------------------------------


def _copy_pages(paths: Iterable[Path], target: Path) -> None:
    target.mkdir(parents=True)
    found = discover(list(paths))
    if found.failures or not found.files:
        raise _refusal(found.failures)
    for number, file in enumerate(found.files, 1):
        shutil.copyfile(file.path, target / f"{number:04d}-{file.path.name}")


def _refusal(failures: tuple[Failure, ...]) -> PipelineError:
    if not failures:
        return PipelineError("there is no page to record", "`pipeline pages PATH` tells why")
    first = failures[0]
    return PipelineError(
        f"{len(failures)} pages can't be recorded, the first: `{first.file}`: {first.detail}",
        "a golden set holds only pages that can be read",
    )


def _settings(options: GoldenOptions) -> dict[str, Any]:
    names = ("min_pixels", "max_pixels", "precision")
    sizes = {name: getattr(options.pages, name) for name in names}
    return sizes | {"dpi": options.pages.decode.dpi, "dtype": options.engine.dtype}


def _as_recorded(options: GoldenOptions, golden: dict[str, Any]) -> GoldenOptions:
    """The options with the settings that decide answers as they were when it was recorded."""
    settings = dict(golden["settings"])
    engine = replace(options.engine, dtype=settings.pop("dtype"))
    settings["decode"] = replace(options.pages.decode, dpi=settings.pop("dpi"))
    return replace(options, pages=replace(options.pages, **settings), engine=engine)


def _read(directory: Path) -> dict[str, Any]:
    try:
        golden: dict[str, Any] = json.loads((directory / "golden.json").read_bytes())
        version = golden["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"`{directory}` holds no golden set: {error}",
            "`pipeline golden record PATH --out DIR` makes one",
        ) from error
    if version != FORMAT_VERSION:
        raise PipelineError(f"`{directory}` is of golden format {version}, not {FORMAT_VERSION}")
    return golden
