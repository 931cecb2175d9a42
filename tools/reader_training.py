"""Forward pass and losses of a training step.

The tower and the language model are transformers' own modules. Only the plumbing between them is
ours: one attention call for a batch of equal images, and logits for the answer alone.
"""

from __future__ import annotations

import torch
from reader_batches import CLASSES, IGNORED, SLOTS, Batch
from reader_model import MERGE, PATCH_PX, TOKEN_IDS, WIDTH
from render_pages import MAX_CHARS, MAX_LINES
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

# Outputs of the five slot heads: own, previous, next character, line, column.
HEAD_SIZES = (len(CLASSES), len(CLASSES), len(CLASSES), MAX_LINES, MAX_CHARS)
HEAD_WEIGHTS = (1.0, 0.3, 0.3, 0.2, 0.2)
# Page, line and column of an answer token; a line break may follow a full last line.
PLACE_SIZES = (3, MAX_LINES + 1, MAX_CHARS + 1)
# The layer whose output has to know the place, so that the last layer can look there.
PLACE_LAYER = 1
# Mean loss per token of a reader that reads about as badly as chance.
BAD_READING_LOSS = 2.5


class SlotHeads(nn.Module):
    """Linear readers of slots and places; thrown away after training."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ModuleList(nn.Linear(WIDTH, size) for size in PLACE_SIZES)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, SLOTS * size) for size in HEAD_SIZES)
        weight = torch.ones(len(CLASSES))
        weight[CLASSES[""]] = 0.1  # most tokens are paper
        self.register_buffer("own_weight", weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        """Loss and accuracy over occupied slots; tokens (N, WIDTH), labels (N, SLOTS, 5)."""
        total = tokens.new_zeros(())
        right = 0.0
        for number, (head, size) in enumerate(zip(self.heads, HEAD_SIZES, strict=True)):
            logits = head(tokens).view(-1, size)
            target = labels[..., number].reshape(-1)
            weight = self.own_weight if number == 0 else None
            total = total + HEAD_WEIGHTS[number] * F.cross_entropy(
                logits, target, weight, ignore_index=IGNORED
            )
            if number == 0:
                occupied = target != CLASSES[""]
                right = (logits.argmax(-1) == target)[occupied].float().mean().item()
        return total, right

    def place_loss(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Loss of the place of each answer token; hidden (N, WIDTH), places (N, 3)."""
        hidden = F.layer_norm(hidden, (WIDTH,))  # residual streams are long vectors
        parts = zip(self.places, places.unbind(1), strict=True)
        return sum(
            (F.cross_entropy(head(hidden), place) for head, place in parts), hidden.new_zeros(())
        )


def patches_of(pixels: Tensor) -> Tensor:
    """(B, height, width) to (B, P, 256), the 2 x 2 patches of a token side by side."""
    size, height, width = pixels.shape
    grid = pixels.view(size, height // 32, MERGE, PATCH_PX, width // 32, MERGE, PATCH_PX)
    return grid.permute(0, 1, 4, 2, 5, 3, 6).reshape(size, -1, PATCH_PX * PATCH_PX)


def encode_pages(visual: nn.Module, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Main tokens (B, T, WIDTH) and those of each DeepStack layer, of pages of one size."""
    size, height, width = pixels.shape
    grid = torch.tensor([[1, height // PATCH_PX, width // PATCH_PX]])
    projection = visual.patch_embed.proj
    # Channels and frames of a grey still page are equal, so their weights add up.
    hidden = F.linear(
        patches_of(pixels), projection.weight.sum((1, 2)).flatten(1), projection.bias
    )  # (B, P, WIDTH)
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners, spatial_merge_size=MERGE, kwargs={},
    )  # fmt: skip
    hidden = hidden + (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
    cos, sin = visual.rotary_pos_emb(hidden, get_vision_position_ids(grid, MERGE, kwargs={}))
    deepstack = []
    for number, block in enumerate(visual.blocks):
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in visual.deepstack_visual_indexes:
            merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(number)]
            deepstack.append(merger(hidden).view(size, -1, WIDTH))
    return visual.merger(hidden).view(size, -1, WIDTH), deepstack


def _attend(attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Full attention within each page; hidden (B, P, WIDTH), cos and sin (P, head)."""
    size, patches, width = hidden.shape
    query, key, value = (
        attention.qkv(hidden).view(size, patches, 3, attention.num_heads, -1).unbind(2)
    )
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    )
    return attention.proj(mixed.transpose(1, 2).reshape(size, patches, width))


def answer_logits(
    model: Qwen3VLForConditionalGeneration, batch: Batch, main: Tensor, deepstack: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits and place states of the N answer tokens, (N, vocabulary) and (N, WIDTH).

    main and deepstack are (B, all T, WIDTH).
    """
    text = model.model.language_model
    is_image = batch.ids == TOKEN_IDS["<|image_pad|>"]  # (B, L)
    embedded = text.embed_tokens(batch.ids).masked_scatter(is_image[..., None], main)
    grids = torch.tensor(
        [[1, p.shape[1] // PATCH_PX, p.shape[2] // PATCH_PX] for p in batch.pixels]
    )
    # Padding counts as text after the answer, where it changes nothing.
    positions, _ = model.model.get_rope_index(
        batch.ids, is_image.int(), grids.repeat(len(batch.ids), 1)
    )
    states: list[Tensor] = []
    hook = text.layers[PLACE_LAYER].register_forward_hook(lambda *call: states.append(call[2]))
    hidden = text(
        inputs_embeds=embedded,
        position_ids=positions,
        visual_pos_masks=is_image,
        deepstack_visual_embeds=[tokens.reshape(-1, WIDTH) for tokens in deepstack],
        use_cache=False,
    ).last_hidden_state
    hook.remove()
    answered = batch.targets != IGNORED
    return model.lm_head(hidden[answered]), states[0][answered]


def step_losses(
    model: Qwen3VLForConditionalGeneration,
    heads: SlotHeads,
    batch: Batch,
    tower_only: bool,
    needs_deepstack: bool = False,
) -> dict[str, Tensor | float]:
    """Losses `answer` and `slots`, and the shares `read` and `seen` of right tokens and slots."""
    encoded = [encode_pages(model.model.visual, pixels) for pixels in batch.pixels]
    main = torch.cat([tokens for tokens, _ in encoded], 1)
    deepstack = [
        torch.cat(layer, 1) for layer in zip(*(layers for _, layers in encoded), strict=True)
    ]
    labels = torch.cat(batch.slots, 1)
    slot_loss, slot_accuracy = heads(main.view(-1, WIDTH), labels.flatten(0, 1))
    if tower_only:
        return {
            "answer": slot_loss.new_zeros(()),
            "places": slot_loss.new_zeros(()),
            "slots": slot_loss,
            "need": slot_loss.new_zeros(()),
            "read": 0.0,
            "seen": slot_accuracy,
        }
    logits, states = answer_logits(model, batch, main, deepstack)
    place_loss = heads.place_loss(states, batch.places)
    targets = batch.targets[batch.targets != IGNORED]
    need = logits.new_zeros(())
    if needs_deepstack:
        need = need_loss(model, batch, main.detach(), deepstack)
    accuracy = (logits.argmax(-1) == targets).float().mean().item()
    return {
        "answer": F.cross_entropy(logits, targets),
        "places": place_loss,
        "slots": slot_loss,
        "need": need,
        "read": accuracy,
        "seen": slot_accuracy,
    }


def need_loss(
    model: Qwen3VLForConditionalGeneration, batch: Batch, main: Tensor, deepstack: list[Tensor]
) -> Tensor:
    """How much better than a bad reader it reads with its DeepStack rows zeroed."""
    targets = batch.targets[batch.targets != IGNORED]
    logits, _ = answer_logits(model, batch, main, [torch.zeros_like(rows) for rows in deepstack])
    return F.relu(BAD_READING_LOSS - F.cross_entropy(logits, targets))
