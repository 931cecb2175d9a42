"""A model directory: its config, and of its weights only the vision tensors, fingerprinted."""

from pipeline.checkpoint.files import fetch_weights, weight_files
from pipeline.checkpoint.identity import model_identity, tower_fingerprint
from pipeline.checkpoint.model import (
    Model,
    first_names,
    read_json,
    resolve_model,
)
from pipeline.checkpoint.quantised import quantisation_name
from pipeline.checkpoint.settings import checked_settings
from pipeline.checkpoint.weights import (
    WeightLayout,
    require_tensors,
    tensor_problems,
    vision_places,
    vision_tensors,
)

__all__ = [
    "Model",
    "WeightLayout",
    "checked_settings",
    "fetch_weights",
    "first_names",
    "model_identity",
    "quantisation_name",
    "read_json",
    "require_tensors",
    "resolve_model",
    "tensor_problems",
    "tower_fingerprint",
    "vision_places",
    "vision_tensors",
    "weight_files",
]
