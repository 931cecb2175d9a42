"""The main job with its cache in a real S3 server: two encoders, a flipped byte, a lost entry."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from conftest import COMMAND, ROOT, Pipeline, texts_of
from s3_server import BUCKET, S3Server, s3_server
from test_readme import sample_texts

pytestmark = pytest.mark.engine

URL = f"s3://{BUCKET}/run/cache"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def entries() -> list[str]:
    found = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="run/cache/v1/")["Contents"]
    return sorted(each["Key"] for each in found if each["Key"].endswith(".parquet"))


def flip_a_byte_of(key: str) -> None:
    client = boto3.client("s3")
    data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))


def test_a_run_from_s3_answers_whatever_became_of_entries(
    server: S3Server, tmp_path: Path, pipeline: Pipeline
) -> None:
    job = tmp_path / "job.jsonl"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    encode = [*COMMAND, "encode", "docs/", "--cache", URL, "--json", "--threads", "1"]
    both = [
        subprocess.Popen(
            list(map(str, [*encode, *more])), cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for more in ([], ["--job", job, "--prompt", "Read the page."])
    ]
    reports = [json.loads(process.communicate(timeout=300)[0]) for process in both]
    assert [report["failed"] for report in reports] == [0, 0]
    there = entries()
    assert len(there) == len(sample_texts())

    flip_a_byte_of(there[0])
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=there[1])
    server.busy = 2  # answers of 503
    tier = ("--cache-local", tmp_path / "near", "--cache-local-bytes", "50MB")
    words = ("--cache", URL, *tier, "--dtype", "float32", "--json")
    done = pipeline("run", job, *words, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (report["succeeded"], report["failed"]) == (len(there), 0)
    assert texts_of(job) == sample_texts()
    assert entries() == there, "both were encoded again"
    quarantined = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="run/cache/quarantine/")[
        "Contents"
    ]
    assert sum(each["Key"].endswith(".parquet") for each in quarantined) == 1
    verified = json.loads(
        pipeline("cache", "verify", "--cache", URL, "--json", cwd=tmp_path).stdout
    )
    assert verified["problems"] == []

    server.requests.clear()
    again = json.loads(pipeline("run", job, *words, cwd=tmp_path).stdout)
    assert (again["reused"], again["engine_starts"]) == (len(there), 0)
    assert server.count("GET", ".parquet") == 0, "the local tier has them"
