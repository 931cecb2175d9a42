"""Line 2: job → validate → pending → engine → results → report."""

from pipeline.run.images import PageOptions
from pipeline.run.line import RunOptions, RunReport, run_directory_of, run_job

__all__ = ["PageOptions", "RunOptions", "RunReport", "run_directory_of", "run_job"]
