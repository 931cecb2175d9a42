"""A model directory: its config, and of its weights only the vision tensors, fingerprinted."""

from pipeline.checkpoint.identity import model_identity, tower_fingerprint
from pipeline.checkpoint.model import BUNDLED_NAME, BUNDLED_PATH, Model, read_json, resolve_model
from pipeline.checkpoint.settings import checked_settings
from pipeline.checkpoint.weights import WeightLayout, vision_places, vision_tensors

__all__ = [
    "BUNDLED_NAME",
    "BUNDLED_PATH",
    "Model",
    "WeightLayout",
    "checked_settings",
    "model_identity",
    "read_json",
    "resolve_model",
    "tower_fingerprint",
    "vision_places",
    "vision_tensors",
]
