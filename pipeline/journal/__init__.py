"""The run directory of a job, and its truth: the journal."""

from pipeline.journal.directory import ItemState, RunDirectory, open_run_directory
from pipeline.journal.lines import complete_lines, write_atomically

__all__ = ["ItemState", "RunDirectory", "complete_lines", "open_run_directory", "write_atomically"]
