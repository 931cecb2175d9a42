"""What an engine's result means; every status and shape that vLLM gives."""

import pytest

from pipeline.engines.llm import result_of
from pipeline.engines.supervisor import SetAside
from pipeline.errors import Failure, Reason
from pipeline.jobs import Request, Result
from pipeline.run.outcome import DamagedEntry, outcome_of, set_aside_failure

KEY = "ab" * 32
REQUEST = Request("a", "/v1/chat/completions", {}, "f" * 64, (KEY,), (("d/a.pdf", 2),), 10)


def answered(**choice: object) -> Result:
    return Result("a", 200, "r1", {"choices": [{"finish_reason": "stop"} | choice]}, None)


def test_an_answer_becomes_a_batch_output_line() -> None:
    record = outcome_of(answered(message={"content": "text"}), REQUEST, 2)
    assert record == {
        "id": "batch_req_" + "f" * 24,
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "r1",
            "body": {"choices": [{"finish_reason": "stop", "message": {"content": "text"}}]},
        },
        "error": None,
        "pipeline": {
            "identity": "f" * 64,
            "attempts": 2,
            "pages": [{"file": "d/a.pdf", "page": 2, "key": KEY}],
            "flags": [],
        },
    }


FAILURES = [
    (Result("a", 400, "", None, "too long"), Reason.REJECTED, False),
    (Result("a", 404, "", None, "no such model"), Reason.REJECTED, False),
    (Result("a", 500, "", None, "boom"), Reason.ENGINE_ERROR, True),
    (Result("a", 200, "", None, None), Reason.ENGINE_ERROR, True),
    (Result("a", 200, "", {"choices": []}, None), Reason.ENGINE_ERROR, True),
    (answered(finish_reason="error"), Reason.ENGINE_ERROR, True),
]


@pytest.mark.parametrize(("result", "reason", "retryable"), FAILURES)
def test_no_answer_is_a_failure_of_its_page(
    result: Result, reason: Reason, retryable: bool
) -> None:
    failure = outcome_of(result, REQUEST, 3)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.retryable, failure.attempts) == (reason, retryable, 3)
    assert (failure.custom_id, failure.file, failure.page) == ("a", "d/a.pdf", 2)


def test_a_refused_cache_entry_is_named() -> None:
    result = Result("a", 400, "", None, f"x bad_cache_entry:{KEY}: digest differs")
    assert outcome_of(result, REQUEST, 1) == DamagedEntry(REQUEST, KEY, "digest differs")


def test_a_request_that_kills_the_engine_is_a_failure_with_its_log() -> None:
    failure = set_aside_failure(SetAside(REQUEST, 2, "died", "x.log"), 4)
    assert failure.reason is Reason.ENGINE_DEATH
    assert failure.detail == "alone in the engine at 2 deaths: died; log `x.log`"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, None),
        ("plain", "plain"),
        ({"error": {"message": "inner", "code": 400}}, "inner"),
        ({"message": "flat"}, "flat"),
    ],
)
def test_every_shape_of_vllms_error_is_read(error: object, text: str | None) -> None:
    output = {"custom_id": "a", "response": {"status_code": 400, "body": None}, "error": error}
    assert result_of(output).error == text


def test_the_commit_of_a_hub_model_stands_in_the_result() -> None:
    body = {"choices": [{"finish_reason": "stop", "message": {"content": "x"}}]}
    line = outcome_of(Result("a", 200, "r", body, None), REQUEST, 1, "c0ffee")
    assert isinstance(line, dict) and line["pipeline"]["revision"] == "c0ffee"
    local = outcome_of(Result("a", 200, "r", body, None), REQUEST, 1)
    assert isinstance(local, dict) and "revision" not in local["pipeline"]
