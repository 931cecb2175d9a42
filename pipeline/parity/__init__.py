"""Same answers as the native path? The same pages and prompt, greedy, once with images and the
tower loaded, once with cached embeddings and the tower absent; compared token by token."""

from pipeline.parity.answers import Answer, Difference
from pipeline.parity.compare import ParityOptions, ParityReport, compare

__all__ = ["Answer", "Difference", "ParityOptions", "ParityReport", "compare"]
