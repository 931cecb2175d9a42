"""Embeddings by way of the prompt, for models whose class in vLLM takes none for an image.

Runs inside the engine's child, before vLLM sees a request. Each image of the request is a part
`{"type": "image_embeds", "image_embeds": "cache:<key>", "placeholder": [text | rows, …]}`: the
texts and runs of rows that the model's own processor would put in the image's place. The chat
template is rendered here, by vLLM's own function, and the request made anew: one message of text
and `prompt_embeds` parts in order, under a template that only joins them. All else of the
request stays, and vLLM tokenises, samples and answers it as any other.
"""

from __future__ import annotations

import base64
import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Piece = str | int
Part = dict[str, Any]

# vLLM takes it for a template of the kind that is given content as a list of parts
PASS_THROUGH = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endfor %}"
)
# what of a request may end up in the rendered prompt
_RENDERED = ("messages", "tools", "documents", "chat_template_kwargs")
# answers that repeat the prompt, where a page's rows have neither text nor tokens
_ABOUT_THE_PROMPT = ("echo", "prompt_logprobs", "return_prompt_text", "return_token_offsets")


def rewrite(body: Mapping[str, Any], renderer: Any) -> dict[str, Any]:
    """The request with its images as `prompt_embeds`; one without images comes back unchanged.

    `renderer` is vLLM's OnlineRenderer, of a server with `--enable-prompt-embeds` and
    `--trust-request-chat-template`. Raises VLLMValidationError, or pydantic's ValidationError,
    for a request that can't be answered so and for a cache entry that can't be used.
    """
    _refuse_own_template(body, renderer)
    images = [part for part in _parts(body) if _is_embedding(part)]
    if not images:
        return dict(body)
    _refuse_unanswerable(body, renderer)
    image_token = _image_token(renderer)
    texts = _rendered(body, renderer, image_token)
    if len(texts) != len(images) + 1:
        raise _refusal(
            f"the chat template gave {len(texts) - 1} image tokens for {len(images)} images"
        )
    content = [_text_part(texts[0])]
    for image, text in zip(images, texts[1:], strict=True):
        content += [*_spliced(image), _text_part(text)]
    # with `add_generation_prompt` off, vLLM answers in the role of the last message
    role = "assistant" if body["messages"][-1]["role"] == "assistant" else "user"
    return dict(body) | {
        "messages": [{"role": role, "content": content}],
        "chat_template": PASS_THROUGH,
        "continue_final_message": False,  # it is rendered in
    }


def restore(answer: Mapping[str, Any], renderer: Any) -> dict[str, Any]:
    """The answer with image tokens, not vLLM's sentinel, among `prompt_token_ids` if it has any."""
    ids = answer.get("prompt_token_ids")
    if not ids:
        return dict(answer)
    from vllm.renderers.chat_utils import PROMPT_EMBEDS_PLACEHOLDER_TOKEN

    tokenizer = renderer.renderer.get_tokenizer()
    sentinel = tokenizer.convert_tokens_to_ids(PROMPT_EMBEDS_PLACEHOLDER_TOKEN)
    image = renderer.model_config.hf_config.image_token_id
    return dict(answer) | {
        "prompt_token_ids": [image if token == sentinel else token for token in ids]
    }


# ---------------------------------------------------------------- what is refused


def _refusal(message: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)


def _refuse_own_template(body: Mapping[str, Any], renderer: Any) -> None:
    """As a server without `--trust-request-chat-template` does; ours has it for our sake only."""
    settings = body.get("chat_template_kwargs")
    refused = renderer.validate_chat_template(
        request_chat_template=body.get("chat_template"),
        chat_template_kwargs=settings if isinstance(settings, Mapping) else None,
        trust_request_chat_template=False,
    )
    if refused is not None:
        raise _refusal("a request's own chat template is not rendered")


def _refuse_unanswerable(body: Mapping[str, Any], renderer: Any) -> None:
    # 0 is some, too: `prompt_logprobs` of 0 are those of the prompt's own tokens
    given = {name: body.get(name) for name in _ABOUT_THE_PROMPT}
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if body.get("add_special_tokens"):  # the template writes them; vLLM adds none to embeddings
        asked.append("add_special_tokens")
    if asked:
        raise _refusal(f"not available where images are given as embeddings: {', '.join(asked)}")
    if renderer.chat_template_content_format == "string":
        raise _refusal("images can't be placed with --chat-template-content-format string")


# ---------------------------------------------------------------- rendering


def _parts(body: Mapping[str, Any]) -> Iterator[Part]:
    """The content parts of all messages in order; what is no part is left to vLLM's checks."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part


def _is_embedding(part: Part) -> bool:
    return part.get("type") == "image_embeds"


def _image_token(renderer: Any) -> str:
    """What chat templates write for an image, e.g. `[IMG]`."""
    number = renderer.model_config.hf_config.image_token_id
    return str(renderer.renderer.get_tokenizer().convert_ids_to_tokens(number))


def _rendered(body: Mapping[str, Any], renderer: Any, image_token: str) -> list[str]:
    """The prompt's text around the images: one piece more than the template placed images.

    An image token that stands in the request's own text is hidden from the search.
    """
    nonce = secrets.token_hex(16)
    image, literal = f"<image-{nonce}>", f"<literal-{nonce}>"

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(image_token, literal)
        if isinstance(value, list):
            return [hidden(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _is_embedding(value):
            return _text_part(image)
        return {name: hidden(item) for name, item in value.items()}

    changed = {name: hidden(body[name]) for name in _RENDERED if name in body}
    text = _apply_template(dict(body) | changed, renderer, image)
    if image in text:
        raise _refusal("the chat template takes no image in one of the messages")
    return [piece.replace(literal, image_token) for piece in text.split(image_token)]


def _apply_template(body: dict[str, Any], renderer: Any, image: str) -> str:
    """The prompt as vLLM's server renders it; a text part that says `image` is an image."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import merge_kwargs
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    request = ChatCompletionRequest.model_validate(body)
    left_out = request.tool_choice == "none" and renderer.exclude_tools_when_tool_choice_none
    tools = None if left_out else request.tools
    defaults = merge_kwargs(
        renderer.default_chat_template_kwargs,
        {"tools": tools and [tool.model_dump() for tool in tools]},
    )
    params = request.build_chat_params(
        renderer.chat_template, renderer.chat_template_content_format
    ).with_defaults(defaults)
    config, tokenizer = renderer.model_config, renderer.renderer.get_tokenizer()
    content_format = resolve_chat_template_content_format(
        chat_template=params.chat_template,
        tools=params.chat_template_kwargs.get("tools"),
        given_format=params.chat_template_content_format,
        tokenizer=tokenizer,
        model_config=config,
    )
    if content_format != "openai":
        raise _refusal("the model's chat template has no place for images")
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format)
    for message in conversation:
        content: Any = message.get("content")
        if isinstance(content, list):
            message["content"] = [_as_image(part, image) for part in content]
    settings = params.get_apply_chat_template_kwargs() | {"tokenize": False}
    return str(safe_apply_chat_template(config, tokenizer, conversation, **settings))


def _as_image(part: Part, image: str) -> Part:
    return {"type": "image"} if part.get("text") == image else part


# ---------------------------------------------------------------- rows


def _spliced(image: Part) -> list[Part]:
    """What stands for an image: text parts and runs of its rows."""
    pieces, reference = image.get("placeholder"), image.get("image_embeds")
    if not isinstance(pieces, list) or not isinstance(reference, str):
        raise _refusal("this model takes embeddings by reference only, not inline")
    rows = _fetch_rows(reference)
    counts = [piece for piece in pieces if isinstance(piece, int)]
    if rows.ndim != 2 or rows.shape[0] != sum(counts) or not rows.is_floating_point():
        raise _refusal(
            f"bad_embedding: {rows.dtype} of shape {tuple(rows.shape)} for {sum(counts)} rows"
        )
    runs = iter(rows.split(counts))
    return [_rows_part(next(runs)) if isinstance(p, int) else _text_part(p) for p in pieces]


def _fetch_rows(reference: str) -> torch.Tensor:
    """Through vLLM's media connector, which is the plugin's: `cache:<key>` → (rows, width)."""
    from vllm import envs
    from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY

    connector = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR)
    rows: torch.Tensor = connector.fetch_image_embedding(reference)
    return rows


def _rows_part(rows: torch.Tensor) -> Part:
    import torch

    buffer = io.BytesIO()
    torch.save(rows.clone(), buffer)  # a slice would be saved with all that it is a slice of
    return {"type": "prompt_embeds", "data": base64.b64encode(buffer.getvalue()).decode()}


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}
