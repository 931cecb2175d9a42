"""What each reason of a failure means and what to do about it; PAGES.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cli.options import printable
from pipeline.errors import Failure, Reason


@dataclass(frozen=True, slots=True)
class Advice:
    """`meaning` says what happened, `hint` the way out."""

    meaning: str
    hint: str


ADVICE = {
    Reason.NOT_FOUND: Advice(
        "there is no such file, or nothing matches the pattern", "check the name"
    ),
    Reason.UNREADABLE: Advice(
        "the file can't be opened or read, or it changed meanwhile",
        "check that the file can be read and is not being written",
    ),
    Reason.OUTSIDE_ROOT: Advice(
        "a job's image lies where jobs may not read", "allow the directory with `--root`"
    ),
    Reason.CORRUPT: Advice(
        "the content can't be decoded, or is no page at all",
        "the file is damaged or no page: fetch it again or leave it out",
    ),
    Reason.TRUNCATED: Advice(
        "the content ends too early", "the file is cut off: fetch it again, or `--allow-truncated`"
    ),
    Reason.TOO_LARGE: Advice(
        "the page has too many pixels, or the file too many pages",
        "split the page or save it with fewer pixels (PDF: a lower `--dpi`)",
    ),
    Reason.ENCRYPTED: Advice(
        "the document can't be opened without a password or certificate",
        "give its password with `--password`, or remove it first",
    ),
    Reason.UNSUPPORTED: Advice(
        "the file is no page format, or one that is not decoded here",
        "convert it to PNG, JPEG, TIFF, WebP or PDF",
    ),
    Reason.NO_SUCH_PAGE: Advice("the document has fewer pages", "pages count from 1"),
    Reason.CRASHED: Advice(
        "the decoder died of the file", "open it in another program and save it anew"
    ),
    Reason.TIMED_OUT: Advice(
        "the decoder took too long for a page", "open it in another program and save it anew"
    ),
    Reason.ASPECT_RATIO: Advice(
        "one side is longer than the model's processor takes", "cut the page into parts"
    ),
    Reason.NOT_FINITE: Advice(
        "the tower's output holds NaN or infinity", "check the model's vision weights"
    ),
    Reason.TOWER_ERROR: Advice(
        "the tower could not compute the page, for lack of memory most often",
        "try again; if it stays, lower `--max-pixels`",
    ),
    Reason.BAD_ENTRY: Advice(
        "a cache entry is damaged and was moved aside", "run the job again: it is encoded anew"
    ),
    Reason.NOT_CACHED: Advice(
        "the page is not in the cache, and nothing may be encoded", "run without `--no-encode`"
    ),
    Reason.BAD_LINE: Advice("the job line is no JSON object", "correct the line"),
    Reason.BAD_FIELD: Advice("a field of the job line is missing or wrong", "correct the field"),
    Reason.BAD_IMAGE: Advice(
        "the url of an image can't be meant", "name a file as `path#page=N`, or use a `data:` url"
    ),
    Reason.BAD_EMBEDDING: Advice(
        "an embedding in the job line does not fit the model", "write the job again for this model"
    ),
    Reason.TOO_LONG: Advice(
        "prompt, pages and answer exceed the model's length",
        "put fewer pages in a request, or raise `--max-model-len`",
    ),
    Reason.REJECTED: Advice("vLLM refused the request", "read the detail, and correct the line"),
    Reason.ENGINE_DEATH: Advice(
        "the engine died of the request more than once", "ask its pages alone, or leave it out"
    ),
    Reason.ENGINE_ERROR: Advice("vLLM failed on the request", "run the job again"),
}
HINTS = {reason: advice.hint for reason, advice in ADVICE.items()}


def failure_line(failure: Failure) -> str:
    """A failure as one line: file, page, reason, detail."""
    page = "" if failure.page is None else f" page {failure.page}"
    detail = f": {failure.detail}" if failure.detail else ""
    return printable(
        f"failed: {failure.file}{page}: {failure.stage.value}/{failure.reason.value}{detail}"
    )
