"""SmolVLM 2 (https://arxiv.org/abs/2504.05299): Idefics3's design, smaller."""

from __future__ import annotations

from pipeline.families.delivery import Delivery
from pipeline.families.idefics3 import Idefics3

FAMILY = Idefics3(
    name="smolvlm",
    shell="SmolVLMForConditionalGeneration",
    prefixes=(
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    ),
    parts=("vision_model.", "connector."),
    delivery=Delivery.PROMPT,
    processor_class="SmolVLMImageProcessor",
)
