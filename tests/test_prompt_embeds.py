"""Requests with pages inside the prompt, against vLLM's own renderer; no engine is started."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers_prompt import PROMPT_MAKERS
from plugin_pages import page

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.registry import renderer_from_config

from pipeline.checkpoint import Model, resolve_model
from pipeline.engines.prompt_embeds import PASS_THROUGH, restore, rewrite
from pipeline.families import Family, family_of

PAGES = {"A": page(1, 224, 160), "B": page(2, 96, 288)}
TEXT = {"type": "text", "text": "Read the page."}
SETTINGS = {"model": "m", "temperature": 0, "max_tokens": 16, "logprobs": True, "seed": 3}


class Subject:
    """A tiny model with what renders its requests: vLLM for images, and vLLM as we start it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: Model = resolve_model(str(checkpoint))
        self.family: Family = family_of(self.model)
        self.native = self._renderer(checkpoint, limit=4)
        self.ours = self._renderer(
            checkpoint, limit=0, enable_prompt_embeds=True, trust_request_chat_template=True
        )
        tower, spec = self.family.load_tower(self.model), self.family.encode_spec(self.model)
        pixels = {name: np.array(image) for name, image in PAGES.items()}
        self.rows = {name: tower.encode(rgb).bfloat16() for name, rgb in pixels.items()}
        self.placeholders = {
            name: self.family.placeholder(self.model, spec, *rgb.shape[:2])
            for name, rgb in pixels.items()
        }

    def _renderer(
        self,
        checkpoint: Path,
        *,
        limit: int,
        trust_request_chat_template: bool = False,
        **more: Any,
    ) -> OnlineRenderer:
        config = ModelConfig(
            model=str(checkpoint),
            dtype=self.family.cpu_dtype or "float32",
            max_model_len=2048,
            limit_mm_per_prompt={"image": limit},
            hf_overrides=self.family.config_overrides(self.model.config),
            mm_processor_cache_gb=0,
            **more,
        )
        return OnlineRenderer(
            config,
            renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            trust_request_chat_template=trust_request_chat_template,
        )

    def image(self, name: str) -> dict[str, Any]:
        """The page as a native request has it."""
        buffer = io.BytesIO()
        PAGES[name].save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    def rows_part(self, name: str, **changes: Any) -> dict[str, Any]:
        """The page as our driver puts it into a request; the rows inline, not by reference."""
        buffer = io.BytesIO()
        torch.save(self.rows[name], buffer)
        return {
            "type": "image_embeds",
            "image_embeds": base64.b64encode(buffer.getvalue()).decode(),
            "placeholder": list(self.placeholders[name]),
        } | changes

    def ask(self, part: Callable[[str], dict[str, Any]], names: str = "A") -> dict[str, Any]:
        content = [*(part(name) for name in names), TEXT]
        return SETTINGS | {"messages": [{"role": "user", "content": content}]}

    def prompt(self, renderer: OnlineRenderer, body: dict[str, Any]) -> dict[str, Any]:
        """What vLLM makes of a request, up to the engine."""
        request = ChatCompletionRequest.model_validate(body)
        done = asyncio.run(renderer.render_chat(request))
        assert isinstance(done, tuple), done
        return done[1][0]

    def image_token_id(self) -> int:
        return int(self.ours.model_config.hf_config.image_token_id)


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(PROMPT_MAKERS["mistral3"](tmp_path_factory.mktemp("prompts") / "mistral3"))


CONVERSATIONS: dict[str, Callable[[Callable[[str], Any]], dict[str, Any]]] = {
    "a page": lambda part: {"messages": [{"role": "user", "content": [part("A"), TEXT]}]},
    "two pages": lambda part: {
        "messages": [{"role": "user", "content": [TEXT, part("B"), TEXT, part("A")]}]
    },
    "side by side": lambda part: {
        "messages": [{"role": "user", "content": [part("A"), part("B"), part("A")]}]
    },
    "several turns": lambda part: {
        "messages": [
            {"role": "system", "content": "Be short.\n\nNow."},
            {"role": "user", "content": [part("A"), TEXT]},
            {"role": "assistant", "content": "It says"},
            {"role": "user", "content": "What <b>else</b>, \u00e4\u20ac?"},
        ]
    },
    "an answer begun": lambda part: {
        "messages": [
            {"role": "user", "content": [part("B"), TEXT]},
            {"role": "assistant", "content": "It says"},
        ],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


def check_conversation(subject: Subject, name: str) -> None:
    """Token by token what vLLM makes of the images themselves, the rows where its own would be."""
    native = subject.prompt(subject.native, SETTINGS | CONVERSATIONS[name](subject.image))
    asked = SETTINGS | CONVERSATIONS[name](subject.rows_part)
    ours = subject.prompt(subject.ours, rewrite(asked, subject.ours))
    ids = restore({"prompt_token_ids": ours["prompt_token_ids"]}, subject.ours)
    assert ids["prompt_token_ids"] == list(native["prompt_token_ids"])
    places = [token == subject.image_token_id() for token in native["prompt_token_ids"]]
    assert ours["is_token_ids"] == [not is_image for is_image in places]
    pages = [
        "A" if part["placeholder"] == list(subject.placeholders["A"]) else "B"
        for message in asked["messages"]
        for part in message["content"]
        if isinstance(part, dict) and part["type"] == "image_embeds"
    ]
    rows = torch.cat([subject.rows[page] for page in pages])
    found = ours["prompt_embeds"][torch.tensor(places)]
    assert torch.equal(found, rows.to(found.dtype))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_is_token_by_token_that_of_the_images(subject: Subject, name: str) -> None:
    check_conversation(subject, name)


@pytest.mark.check
@pytest.mark.parametrize("maker", ["lightonocr", "pixtral_hf", "idefics3", "lfm2_vl"])
def test_prompts_of_the_other_families(maker: str, tmp_path: Path) -> None:
    subject = Subject(PROMPT_MAKERS[maker](tmp_path / maker))
    for name in CONVERSATIONS:
        check_conversation(subject, name)


# ---------------------------------------------------------------- what stays


def test_a_request_without_pages_stays_as_it_is(subject: Subject) -> None:
    body = SETTINGS | {"messages": [{"role": "user", "content": "Hello [IMG]"}]}
    assert rewrite(body, subject.ours) == body


def test_all_but_the_prompt_stays(subject: Subject) -> None:
    body = subject.ask(subject.rows_part) | {"n": 3, "response_format": {"type": "json_object"}}
    changed = rewrite(body, subject.ours)
    replaced = {"messages", "chat_template", "continue_final_message"}
    assert changed.keys() - body.keys() == replaced - {"messages"}
    assert {name: changed[name] for name in body if name != "messages"} == {
        name: value for name, value in body.items() if name != "messages"
    }
    assert changed["chat_template"] == PASS_THROUGH
    assert [message["role"] for message in changed["messages"]] == ["user"]


def test_an_answer_begun_stays_the_assistants(subject: Subject) -> None:
    body = SETTINGS | CONVERSATIONS["an answer begun"](subject.rows_part)
    (message,) = rewrite(body, subject.ours)["messages"]
    assert message["role"] == "assistant"


def test_an_image_token_in_the_text_does_no_harm(subject: Subject) -> None:
    body = SETTINGS | {
        "messages": [
            {"role": "system", "content": "Say [IMG] twice"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a[IMG]b"}, subject.rows_part("A")],
            },
        ]
    }
    prompt = subject.prompt(subject.ours, rewrite(body, subject.ours))
    tokenizer = subject.ours.renderer.get_tokenizer()
    texts = [
        token
        for token, is_text in zip(prompt["prompt_token_ids"], prompt["is_token_ids"], strict=True)
        if is_text
    ]
    assert "Say [IMG] twice" in tokenizer.decode(texts)
    assert "a[IMG]b" in tokenizer.decode(texts)
    assert prompt["is_token_ids"].count(False) == len(subject.rows["A"])


# ---------------------------------------------------------------- what is refused


def refusal(subject: Subject, body: dict[str, Any]) -> str:
    with pytest.raises(VLLMValidationError) as error:
        rewrite(body, subject.ours)
    return str(error.value)


@pytest.mark.parametrize(
    "own", [{"chat_template": "{{ 7 * 7 }}"}, {"chat_template_kwargs": {"chat_template": "x"}}]
)
def test_a_requests_own_template_is_refused(subject: Subject, own: dict[str, Any]) -> None:
    for body in (
        subject.ask(subject.rows_part),
        SETTINGS | {"messages": [{"role": "user", "content": "x"}]},
    ):
        assert "own chat template is not rendered" in refusal(subject, body | own)


@pytest.mark.parametrize(
    "asked",
    [
        {"echo": True},
        {"prompt_logprobs": 0},
        {"return_prompt_text": True},
        {"add_special_tokens": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_answers_about_the_prompt_are_refused(subject: Subject, asked: dict[str, Any]) -> None:
    message = refusal(subject, subject.ask(subject.rows_part) | asked)
    assert f"not available where images are given as embeddings: {next(iter(asked))}" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placeholder": None}, "by reference only, not inline"),
        ({"placeholder": ["x", 3]}, "bad_embedding: torch.bfloat16 of shape (48, 64) for 3 rows"),
        ({"placeholder": []}, "for 0 rows"),
        ({"image_embeds": None}, "by reference only, not inline"),
    ],
)
def test_parts_that_can_not_be_spliced_are_refused(
    subject: Subject, changes: dict[str, Any], message: str
) -> None:
    body = subject.ask(lambda name: subject.rows_part(name, **changes))
    assert message in refusal(subject, body)


def test_a_page_where_the_template_takes_none_is_refused(subject: Subject) -> None:
    body = SETTINGS | {
        "messages": [{"role": "assistant", "content": [TEXT, subject.rows_part("A")]}]
    }
    assert refusal(subject, body) == "the chat template gave 0 image tokens for 1 images"


def test_messages_that_are_none_are_refused_as_by_vllm(subject: Subject) -> None:
    body = subject.ask(subject.rows_part)
    body["messages"].append({"content": "no role"})
    with pytest.raises(ValueError, match="role"):
        rewrite(body, subject.ours)


def test_vllms_own_sentinel_in_the_text_is_refused_by_vllm(subject: Subject) -> None:
    body = subject.ask(subject.rows_part)
    body["messages"][0]["content"].append({"type": "text", "text": "<prompt_embeds>"})
    with pytest.raises(VLLMValidationError, match="reserved"):
        subject.prompt(subject.ours, rewrite(body, subject.ours))


def test_a_bad_cache_entry_is_named(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline import plugin

    plugin.register()
    for name, value in (
        ("VLLM_MEDIA_CONNECTOR", plugin.CONNECTOR),
        (plugin.ENV_CACHE, str(tmp_path)),
        (plugin.ENV_TOWER, "0" * 64),
    ):
        monkeypatch.setenv(name, value)
    key = "a" * 64
    body = subject.ask(lambda name: subject.rows_part(name, image_embeds=f"cache:{key}"))
    assert refusal(subject, body).startswith(f"bad_cache_entry:{key}: ")


# ---------------------------------------------------------------- prefix caching


def block_hashes(subject: Subject, rows: torch.Tensor) -> list[bytes]:
    """vLLM's hashes of the blocks of 16 tokens of a request for a page with these rows."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    subject.rows["A"], before = rows, subject.rows["A"]
    text = {"type": "text", "text": "The same for every page, so that it is cached once."}
    content = [text, subject.rows_part("A"), TEXT]
    subject.rows["A"] = before
    body = SETTINGS | {"messages": [{"role": "user", "content": content}]}
    prompt = subject.prompt(subject.ours, rewrite(body, subject.ours))
    request = Request(
        request_id="r",
        prompt_token_ids=prompt["prompt_token_ids"],
        prompt_embeds=prompt["prompt_embeds"],
        prompt_is_token_ids=prompt["is_token_ids"],
        sampling_params=SamplingParams(),
        pooling_params=None,
        block_hasher=get_request_block_hasher(16, sha256),
    )
    return list(request.block_hashes)


def test_pages_of_one_size_share_no_cached_blocks(subject: Subject) -> None:
    """Nor do rows that differ in one value; the text in front of the page is shared."""
    rows = subject.rows["A"]
    nearly = rows.clone()
    nearly[0, 0] += 1
    one, again, other = (block_hashes(subject, r) for r in (rows, rows.clone(), nearly))
    assert one == again and len(one) == len(other)
    shared = sum(a == b for a, b in zip(one, other, strict=True))
    assert one[:shared] == other[:shared] and 2 <= shared < len(one)
