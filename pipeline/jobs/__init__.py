"""OpenAI batch lines in and out; the whole job file is validated before anything starts.

Format: https://platform.openai.com/docs/api-reference/batch/request-input. An image is an
`image_url` part whose url is a path relative to the job file (percent-encoded, `#page=N` from 1
the only fragment), a `file://` url or a `data:` url.
"""

from pipeline.jobs.parts import (
    CACHE_PREFIX,
    cache_key_of,
    cache_part,
    content_parts,
    inline_embedding_bytes,
    put_inline,
    with_embeddings,
)
from pipeline.jobs.read import read_job
from pipeline.jobs.records import (
    SUPPORTED_URLS,
    ImageReference,
    JobImage,
    JobLine,
    Request,
    Result,
)
from pipeline.jobs.write import check_job_path, image_url, write_job

__all__ = [
    "CACHE_PREFIX",
    "SUPPORTED_URLS",
    "ImageReference",
    "JobImage",
    "JobLine",
    "Request",
    "Result",
    "cache_key_of",
    "cache_part",
    "check_job_path",
    "content_parts",
    "image_url",
    "inline_embedding_bytes",
    "put_inline",
    "read_job",
    "with_embeddings",
    "write_job",
]
