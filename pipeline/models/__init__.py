"""The models that come with the package."""

from pathlib import Path

BUNDLED_NAME = "tiny-reader"
BUNDLED_PATH = Path(__file__).parent / BUNDLED_NAME
