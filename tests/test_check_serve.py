"""The same job through `pipeline run` and through vLLM's own server, on native images.

`make check PART=serve`: sixty lines of every kind that people write, engine in float32; same
texts, same usage, same finish reasons, same log probabilities.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Pipeline, results_of

from pipeline.checkpoint import resolve_model

pytestmark = [pytest.mark.check, pytest.mark.engine]

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
START_S = 300


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"pages/page-{number:04d}.png"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


READ = text("Read the page.")
SYSTEM = {"role": "system", "content": "You read documents."}
ASSISTANT = {"role": "assistant", "content": "Yes."}


def bodies(n: int) -> dict[str, dict[str, Any]]:
    """One body of each kind, on pages from number 3·n on."""
    a, b, c = image(3 * n), image(3 * n + 1), image(3 * n + 2)
    one = [user(READ, a)]
    schema = {"type": "json_schema", "json_schema": {"name": "page", "schema": SCHEMA}}
    return {
        "text": {"messages": [{"role": "user", "content": f"Say {n}."}], "max_tokens": 24},
        "image": {"messages": one, "max_tokens": 64},
        "image-first": {"messages": [user(b, READ)], "max_tokens": 64},
        "three": {
            "messages": [SYSTEM, user(READ, a, b), ASSISTANT, user(c)],
            "max_tokens": 48,
        },
        "schema": {"messages": one, "max_tokens": 64, "response_format": schema},
        "object": {"messages": one, "max_tokens": 64, "response_format": {"type": "json_object"}},
        "n": {"messages": one, "max_tokens": 16, "n": 2, "temperature": 0.8, "seed": n},
        "stop": {"messages": one, "max_tokens": 64, "stop": ["e", "\n"]},
        "seed": {"messages": one, "max_tokens": 32, "temperature": 1.0, "seed": 7 + n},
        "logprobs": {"messages": one, "max_tokens": 12, "logprobs": True, "top_logprobs": 3},
        "literal": {"messages": [user(a, text("What is <b>?"))], "max_tokens": 24},
        "kwargs": {
            "messages": one, "max_tokens": 24, "chat_template_kwargs": {"enable_thinking": False},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, pipeline: Pipeline, render: Any) -> Path:
    """A directory with the job, its run, and the same job with images inside."""
    directory = tmp_path_factory.mktemp("serve")
    render(301, 15).rename(directory / "pages")
    with (directory / "job.jsonl").open("w") as file:
        for n in range(5):
            for name, body in bodies(n).items():
                body = {"temperature": 0} | body
                line = {"custom_id": f"{name}-{n}", "method": "POST", "url": "/v1/chat/completions"}
                file.write(json.dumps(line | {"body": body}) + "\n")
    words = ["run", "job.jsonl", "--dtype", "float32", "--retries", 0, "--json"]
    report = json.loads(pipeline(*words, cwd=directory, code=None).stdout)
    assert (report["requests"], report["succeeded"]) == (60, 60)
    pipeline("emit", "job.jsonl", "--out", "native", "--native", cwd=directory)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a stock `vllm serve` of the bundled model, tower loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    model = resolve_model(None)
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    words += ["--model", str(model.path), "--served-model-name", model.name, "--dtype", "float32"]
    words += ["--enforce-eager", "--host", "127.0.0.1", "--limit-mm-per-prompt", '{"image": 8}']
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        end = time.monotonic() + START_S
        while not _is_up(port):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def ask(server: str, line: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(line["body"]).encode()
    head = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(server + line["url"], data, head), timeout=600
    ) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def said(body: dict[str, Any]) -> dict[str, Any]:
    """What must be the same: texts, finish and stop reasons, usage; log probabilities rounded."""
    return {
        "usage": {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
        "choices": [
            {
                "text": choice["message"]["content"],
                "finish": choice["finish_reason"],
                "stop": choice.get("stop_reason"),
                "logprobs": [
                    (token["token"], [top["token"] for top in token["top_logprobs"]])
                    for token in (choice.get("logprobs") or {}).get("content") or []
                ],
            }
            for choice in sorted(body["choices"], key=lambda choice: choice["index"])
        ],
    }


def test_answers_are_those_of_the_server(
    work: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = sorted((work / "native").glob("*.jsonl"))
    lines = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    assert len(lines) == 60
    with ThreadPoolExecutor(8) as pool:
        native = dict(
            zip(
                [line["custom_id"] for line in lines],
                pool.map(lambda line: said(ask(server, line)), lines),
                strict=True,
            )
        )
    ours = {
        name: said(record["response"]["body"])
        for name, record in results_of(work / "job.jsonl").items()
    }
    different = {name: (native[name], ours[name]) for name in native if native[name] != ours[name]}
    with capsys.disabled():
        print(f"\nserve: {len(native)} lines, {len(native) - len(different)} the same")
    assert different == {}
